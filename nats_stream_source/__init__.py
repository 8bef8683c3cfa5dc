"""A Spark Structured Streaming source for NATS JetStream, driven by ordered consumers.

Spark finds the formats of an installed package by the modules ``pyspark_nats_*``; :func:`register`
registers them with a session explicitly::

    from nats_stream_source import register

    register(spark)
    spark.readStream.format("nats_kv").option("servers", …).option("bucket", "fleet").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nats_stream_source.deferred import deferred

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nats_stream_source.arrow import read_bucket as read_bucket
    from nats_stream_source.spark.enrichment.lookup import lookup as lookup
    from nats_stream_source.spark.progress import watch_progress as watch_progress
    from nats_stream_source.spark.session import configure as configure
else:
    _names, __getattr__ = deferred(
        __name__,
        {
            "arrow": "read_bucket",
            "spark.enrichment.lookup": "lookup",
            "spark.progress": "watch_progress",
            "spark.session": "configure",
        },
    )
    __all__ = ["__version__", "register", *_names]


def register(spark: SparkSession, *, check: bool = True) -> None:
    """Register the formats of this package (``nats_kv``, ``nats_stream``) with a Spark session.

    Args:
        check: run a query of one row first, which asks a Python worker for its Python and packages.

    Raises:
        MissingPackageError: pyspark is not installed.
        WorkerPythonError: the workers' Python cannot be run, has another version than the driver's,
            or lacks this package or one that it requires.
    """
    from nats_stream_source.spark.datasource import NatsKvDataSource, NatsStreamDataSource
    from nats_stream_source.spark.task_counts import counted_source
    from nats_stream_source.spark.worker_check import verify_workers

    if check:
        verify_workers(spark, __version__)
    for source in (NatsKvDataSource, NatsStreamDataSource):
        spark.dataSource.register(counted_source(spark, source))


_loader = __spec__.loader
if type(_loader).__name__ == "zipimporter":
    from nats_stream_source.zip_package import find_compiled_modules

    find_compiled_modules(_loader.archive)  # type: ignore[union-attr]
