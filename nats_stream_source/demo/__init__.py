"""The main job, end to end, on real data: ``python -m nats_stream_source.demo``.

A year of departures from New York is replayed into a key-value bucket, aircraft by aircraft, while
Spark follows the bucket into a Delta table; at the end the table and the bucket are compared.

- :mod:`preflight` what the machine must have, before anything is installed
- :mod:`flights` the data, as a list of writes
- :mod:`writer` replays them into the bucket, in a process of its own
- :mod:`job` the Spark side: the session and the query
- :mod:`tables` reads the result and the bucket, each by a way that this package has no part in
- :mod:`compare` finds the keys that differ
- :mod:`screen` what the user sees
"""
