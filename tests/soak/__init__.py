"""The soak: writes, reads and trouble for a while, then a comparison of everything with everything.

Four parties, in processes of their own:

- the *generator* writes unique, numbered values and markers, awaits each PubAck, and keeps the
  *ledger*: what was sent, what was acknowledged under which sequence, what nobody knows;
- the *driver* is a Spark driver with three queries that follow what is written into sinks, from
  checkpoints: ``full`` (all revisions of a bucket), ``current`` (a bucket's current values into a
  Delta table) and ``stream`` (a stream, read in several splits); ``plain.py`` is the same without
  Spark, for more restarts in less time;
- the *servers*: a cluster of three, or one (``servers.py``), each behind a proxy;
- this process does the harm: what and when is the *schedule*, which the seed decides. It also
  starts the driver again (``supervisor.py``) and looks whether its queries get on (``stall.py``).

When time is up the harm ends, the servers recover, the queries run to the end, nothing of them may
be left on the servers (``remains.py``), and the *oracle* compares ledger, streams and sinks.
``make soak``, or ``PYTHONPATH=tests python -m soak --help``.
"""
