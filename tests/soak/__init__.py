"""The soak: writes and reads under random faults, then compares all sinks with all writes.

It consists of these processes:

- the *generator* writes unique, numbered values and markers, awaits each PubAck, and records in the
  *ledger* what was sent, what was acknowledged with which sequence, and what is unsure. Another
  process (``sites.py``) creates, fills and deletes buckets;
- the *driver* is a Spark driver with five queries that write to sinks, from checkpoints: ``full``
  (all revisions of a bucket), ``current`` (the current values of a bucket, into a Delta table),
  ``stream`` (a stream, read in several splits), ``sites`` (the buckets that come and go, by a
  pattern) and ``copy`` (the stream, written to another stream with ``format("nats_stream")``).
  ``driver_without_spark.py`` runs all but ``copy`` without Spark, for more restarts in less time;
- the *servers*: a cluster of three, or one (``servers.py``), each behind a proxy;
- this process injects the faults of the *schedule*, which the seed determines. It also restarts the
  driver (``supervisor.py``).

At the end the faults stop, the servers recover and the queries read all messages. A query without a
micro-batch for long has stalled (``collect.py``). Consumers and connections that remain on the
servers are leaks (``servers.py``). The *oracle*
(``tests/support/oracle``) compares ledger, streams and sinks. ``make soak``, or
``python -m tests.soak --help``.
"""
