"""The main job, end to end, on real data: ``python -m nats_stream_source.demo``.

A year of departures from New York is replayed into a key-value bucket, aircraft by aircraft, while
Spark follows the bucket into a Delta table. At the end, the demo compares the table with the
bucket.

- :mod:`preflight` checks the machine's requirements, before any package is installed
- :mod:`flights` reads the data and returns it as a list of writes
- :mod:`writer` replays the writes into the bucket, in a separate process
- :mod:`table_reader` measures when a write is visible in the table, in a separate process
- :mod:`job` starts the Spark session and the query
- :mod:`metrics` is where the queries serve their metrics
- :mod:`story` runs the steps of the demo
- :mod:`tables` reads the result and the bucket, without this package's own readers
- :mod:`compare` reports the keys that differ
- :mod:`screen` prints the progress and the result
"""
