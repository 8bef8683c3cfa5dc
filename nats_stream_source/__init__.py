"""A Spark Structured Streaming source for NATS JetStream, driven by ordered consumers.

Spark finds the formats by itself where this package is installed; :func:`register` makes them known
to a session explicitly::

    from nats_stream_source import register

    register(spark)
    spark.readStream.format("nats_kv").option("servers", …).option("bucket", "fleet").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nats_stream_source.progress import watch_progress

__version__ = "0.1.0"
__all__ = ["__version__", "register", "watch_progress"]


def register(spark: SparkSession) -> None:
    """Register the formats of this package (``nats_kv``, ``nats_stream``) with a Spark session."""
    from nats_stream_source.source.kv import NatsKvDataSource
    from nats_stream_source.source.stream import NatsStreamDataSource

    spark.dataSource.register(NatsKvDataSource)
    spark.dataSource.register(NatsStreamDataSource)


def __getattr__(name: str) -> Any:
    # Spark starts processes that only look for the formats: what they do not need waits.
    if name != "watch_progress":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nats_stream_source.progress import watch_progress

    return watch_progress
