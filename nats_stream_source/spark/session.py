"""Settings of a Spark session that shorten a small micro-batch.

docs/internals/performance_method.md has the measurement of each setting. They do not require Delta
Lake.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nats_stream_source.extras import import_failure
from nats_stream_source.logs import field_logger

try:
    from nats_stream_source.spark.compat import ADMISSION_CONTROL
except ModuleNotFoundError as error:
    raise import_failure(error, "spark") from error

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = field_logger(__name__)

SETTINGS: Mapping[str, str] = {
    # Over TCP, each Python step of a task waits 40 ms for a delayed acknowledgement. Spark 4.0 and
    # 4.1 lack the sockets, Windows has them only in part.
    **(
        {"spark.python.unix.domain.socket.enabled": "true"}
        if ADMISSION_CONTROL and sys.platform != "win32"
        else {}
    ),
}
"""The settings that this Spark has and that make a small micro-batch more than 10 % faster."""


def configure(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Configure a session for small micro-batches of this package's formats.

    ``spark = configure(SparkSession.builder).getOrCreate()``

    The settings apply to a session whose JVM is not running yet: they go into
    ``spark-defaults.conf`` where another program starts it (docs/operations.md). On a local master,
    Python workers get the Python of this program unless ``PYSPARK_PYTHON`` is set: by default Spark
    takes the first ``python3`` on the ``PATH``. Set another master before this call.

    Args:
        builder: other settings of it stay. With :func:`nats_stream_source.delta.configure_delta`,
            the order of the two calls does not matter.
    """
    # spark-submit has started the JVM, which has decided on the Python of its workers.
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    master = builder._options.get("spark.master", "local")
    if master.startswith("local") and not submitted:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    return builder


_warned = False


def warn_of_missing_settings(spark: SparkSession) -> None:
    """Log the settings that the session lacks, once for each process."""
    global _warned
    if _warned:
        return
    _warned = True
    missing = missing_settings(spark)
    if missing:
        _log.warning(
            "the session lacks settings that shorten each micro-batch",
            action="call nats_stream_source.configure(SparkSession.builder) before the session "
            "starts, or add to spark-defaults.conf: "
            + "; ".join(f"{name} {value}" for name, value in missing.items()),
        )


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is a client of a Spark Connect server, without a JVM of its own."""
    return not hasattr(spark, "_jvm")


def missing_settings(spark: SparkSession) -> dict[str, str]:
    """The settings of :data:`SETTINGS` that the session was started without."""
    if is_connect(spark):
        started = {name: spark.conf.get(name, None) or "" for name in SETTINGS}
    else:
        # Those that the JVM was started with: a session accepts later values without an effect.
        started = dict(spark.sparkContext.getConf().getAll())
    return {name: value for name, value in SETTINGS.items() if started.get(name) != value}
