"""Makes ``format("nats_stream")`` available, as ``pyspark_nats_kv`` does for ``nats_kv``."""

from nats_stream_source.spark.datasource import NatsStreamDataSource as DefaultSource

__all__ = ["DefaultSource"]
