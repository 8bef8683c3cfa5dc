"""Lets Spark find ``format("nats_kv")`` by itself: it looks into modules named ``pyspark_*``."""

from nats_stream_source.source.kv import NatsKvDataSource as DefaultSource

__all__ = ["DefaultSource"]
