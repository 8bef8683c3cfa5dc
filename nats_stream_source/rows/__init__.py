"""What ``nats_kv`` and ``nats_stream`` read, without Spark: offsets, splits, rows, terms of errors.

Spark's formats and the follower of a bucket (:mod:`nats_stream_source.delta.follower`) share it.
"""
