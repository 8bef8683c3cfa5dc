"""A Spark Structured Streaming source for NATS JetStream, driven by ordered consumers.

Spark finds the formats by itself where this package is installed; :func:`register` makes them known
to a session explicitly::

    from nats_stream_source import register

    register(spark)
    spark.readStream.format("nats_kv").option("servers", …).option("bucket", "fleet").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__version__ = "0.1.0"
__all__ = ["__version__", "register"]


def register(spark: SparkSession) -> None:
    """Register the formats of this package (``nats_kv``) with a Spark session."""
    from nats_stream_source.source.kv import NatsKvDataSource

    spark.dataSource.register(NatsKvDataSource)
