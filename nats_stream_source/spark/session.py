"""Settings of a Spark session: those that shorten a small micro-batch, and those of Delta Lake.

docs/internals/performance_method.md has the measurement of each setting of the first kind. Without
Delta's settings a session needs neither its jar nor the package ``delta-spark``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nats_stream_source.errors import ConfigurationError, MissingPackageError, needs_extra
from nats_stream_source.logs import field_logger

with needs_extra("spark"):
    from pyspark.version import __version__ as spark_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = field_logger(__name__)

ADMISSION_CONTROL = importlib.util.find_spec("pyspark.sql.streaming.datasource") is not None
"""Whether Spark passes a micro-batch's start and limit to ``latestOffset`` (since 4.2)."""

SETTINGS: Mapping[str, str] = (
    # Over TCP, each Python step of a task waits 40 ms for a delayed acknowledgement. Spark 4.0 and
    # 4.1 lack the sockets, Windows has them only in part.
    {"spark.python.unix.domain.socket.enabled": "true"}
    if ADMISSION_CONTROL and sys.platform != "win32"
    else {}
)
"""The settings that this Spark has and that make a small micro-batch more than 10 % faster."""


DELTA_SETTINGS: Mapping[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
"""The settings that Delta Lake requires of a session."""

SMALL_MACHINE: Mapping[str, str] = {
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.shuffle.partitions": "2",
}
"""Settings for a few cores: the defaults, 50 and 200, make every MERGE take many seconds."""


def configure(
    builder: SparkSession.Builder,
    *,
    delta: bool = False,
    small_machine: bool = False,
    download: bool = True,
) -> SparkSession.Builder:
    """Configure a session for this package: small micro-batches, and Delta Lake on request.

    ``spark = configure(SparkSession.builder).getOrCreate()``

    The settings apply to a session whose JVM is not running yet: they go into
    ``spark-defaults.conf`` where another program starts it (docs/operations.md). On a local master,
    Python workers get the Python of this program unless ``PYSPARK_PYTHON`` is set: by default Spark
    takes the first ``python3`` on the ``PATH``. Set another master before this call.

    Args:
        builder: other settings of it stay.
        delta: also Delta Lake's jar and its two settings, for ``engine="spark"`` and for Spark's
            own reads of Delta tables. The jar has the version of the installed ``delta-spark``;
            Spark downloads it from Maven Central when the JVM starts (20 s the first time).
        small_machine: also set Delta's and Spark's number of partitions to 2, for a few cores.
        download: False if Delta's jar is already on Spark's class path.

    Raises:
        ConfigurationError: the session would start a JVM, and Java was not found.
        MissingPackageError: ``delta`` is set, and ``delta-spark`` is not installed.
    """
    # spark-submit has started the JVM, which has decided on the Python of its workers.
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not (submitted or "spark.remote" in builder._options or "SPARK_REMOTE" in os.environ):
        _require_java()
    master = builder._options.get("spark.master", "local")
    if master.startswith("local") and not submitted:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {**SETTINGS, **(SMALL_MACHINE if small_machine else {})}
    if delta:
        settings.update(DELTA_SETTINGS)
        if download:
            settings["spark.jars.packages"] = delta_artifact()
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder


def delta_artifact() -> str:
    """The Maven coordinates of Delta's jar for the installed ``delta-spark`` and Spark."""
    require_delta_package()
    version = importlib.metadata.version("delta-spark")
    spark = ".".join(spark_version.split(".")[:2])
    return f"io.delta:delta-spark_{spark}_2.13:{version}"


def require_delta_package() -> None:
    """Raise MissingPackageError if ``delta-spark`` is not installed."""
    if importlib.util.find_spec("delta") is None:
        raise MissingPackageError(
            "could not use engine='spark': the package delta-spark is not installed; run "
            "`pip install 'nats-stream-source[delta]'`"
        )


def _require_java() -> None:
    """Raise ConfigurationError if Spark's launcher would not find Java.

    The launcher takes ``$JAVA_HOME/bin/java``, else the first ``java`` on the ``PATH``. Without
    one, Spark fails with ``[JAVA_GATEWAY_EXITED]``, which does not name a version to install.
    """
    home = os.environ.get("JAVA_HOME") or None
    path = None if home is None else str(Path(home, "bin"))
    if shutil.which("java", path=path) is None:
        where = "the PATH has no java" if home is None else f"JAVA_HOME is {home}, without bin/java"
        raise ConfigurationError(
            f"could not start Spark: {where}, expected Java 17 or newer; install it (Debian and "
            f"Ubuntu: `apt-get install openjdk-17-jre-headless`; macOS: `brew install "
            f"openjdk@17`), or set JAVA_HOME to one"
        )


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
