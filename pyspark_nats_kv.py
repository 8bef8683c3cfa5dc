"""Makes ``format("nats_kv")`` available: Spark loads every module named ``pyspark_*``."""

from nats_stream_source.spark.datasource import NatsKvDataSource as DefaultSource

__all__ = ["DefaultSource"]
