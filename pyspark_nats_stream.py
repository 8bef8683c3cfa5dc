"""Lets Spark find ``format("nats_stream")`` by itself, as ``pyspark_nats_kv`` does."""

from nats_stream_source.source.stream import NatsStreamDataSource as DefaultSource

__all__ = ["DefaultSource"]
