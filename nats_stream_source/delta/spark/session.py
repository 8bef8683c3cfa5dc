"""Delta Lake in a Spark session: what a session lacks, and the settings of a command.

Spark's engine requires three things: the Python package ``delta-spark``, Delta's jar of the same
version in the JVM, and two settings of the session. Without one of them Delta fails with errors
that name none (``TypeError: 'JavaPackage' object is not callable``). :func:`missing` checks them in
this order. With Spark Connect they are on the server, and the check covers the package only.

**Settings of a command.** Some settings of a session change what Delta's commands store, and Spark
reports nothing (measured with Delta Lake 4.4). :func:`temporary_settings` sets them for the
commands of this package, and sets them back:

- ``outputTimestampType=TIMESTAMP_MILLIS`` drops microseconds, also of ``stream_created``, by which
  entries are compared.
- The rebase mode ``LEGACY`` shifts dates before 1582 and times before 1900 by days, in files that
  Spark writes for all other readers, and in files of other writers for Spark. ``EXCEPTION`` fails
  for them, when the tables may be created and empty.
- With ``txnAppId`` and ``txnVersion`` Delta Lake commits one command and skips each later one.
- A table that is created with the default ``appendOnly`` accepts one merge.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa
from py4j.java_gateway import JavaPackage
from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.delta.spark.columns import spark_schema
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.spark.session import (
    DELTA_SETTINGS,
    delta_artifact,
    is_connect,
    require_delta_package,
)

SKIPS_EMPTY_COMMITS = "spark.databricks.delta.skipRecordingEmptyCommits"
"""Whether a command that changes nothing commits nothing."""

EXACT: Mapping[str, str | None] = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    **{
        f"spark.sql.parquet.{kind}RebaseModeIn{way}": "CORRECTED"
        for kind in ("datetime", "int96")
        for way in ("Write", "Read")
    },
    "spark.databricks.delta.properties.defaults.appendOnly": None,
    "spark.databricks.delta.write.txnAppId": None,
    "spark.databricks.delta.write.txnVersion": None,
}
"""The settings with which Delta's commands store values and commits as they are."""

_TASK_ROWS, _TASK_BYTES = 10_000, 16 << 20
_FEW_BYTES = 8 << 20


def require_delta(spark: SparkSession) -> None:
    """Raise an error that names what the session lacks for ``engine="spark"``.

    Raises:
        MissingPackageError: ``delta-spark`` is not installed.
        ConfigurationError: Delta's jar or a setting is missing.
    """
    require_delta_package()
    problem = missing(spark)
    if problem is not None:
        raise ConfigurationError(
            f"could not use engine='spark': {problem}; start the session with "
            f"`configure(SparkSession.builder, delta=True).getOrCreate()` "
            f"(nats_stream_source.delta), or use engine='driver'"
        )


def missing(spark: SparkSession) -> str | None:
    """What the session lacks for ``engine="spark"``: package, jar or setting; None if nothing."""
    if importlib.util.find_spec("delta") is None:
        return "the package delta-spark is not installed"
    if is_connect(spark):
        return None
    jvm = spark._jvm
    assert jvm is not None
    if isinstance(jvm.io.delta.tables.DeltaTable, JavaPackage):
        return f"the session lacks Delta's jar ({delta_artifact()})"
    if "DATABRICKS_RUNTIME_VERSION" in os.environ:
        return None  # its Delta Lake has a catalog and extensions of its own
    for name, value in DELTA_SETTINGS.items():
        if value not in (spark.conf.get(name, None) or ""):
            return f"the session's setting {name} lacks {value}"
    return None


@contextmanager
def temporary_settings(
    spark: SparkSession, settings: Mapping[str, str | None] = EXACT
) -> Iterator[None]:
    """Settings of the session for a block; None unsets one."""
    before = {name: spark.conf.get(name, None) for name in settings}
    changed = {name: value for name, value in settings.items() if value != before[name]}
    try:
        _set(spark, changed)
        yield
    finally:
        _set(spark, {name: before[name] for name in changed})


def _set(spark: SparkSession, settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, value)


def data_frame(spark: SparkSession, rows: pa.Table, schema: pa.Schema) -> DataFrame:
    """Rows as a DataFrame with these columns.

    The driver's JVM holds up to 8 MiB as rows, whose size Spark knows when it joins them, and more
    as Arrow, which takes less memory. It sends the rows of a task in one message, of at most
    ``spark.rpc.message.maxSize``.
    """
    rows_of_task = len(rows) * _TASK_BYTES // max(1, rows.nbytes)
    settings = {
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(max(1, min(_TASK_ROWS, rows_of_task))),
        "spark.sql.execution.arrow.localRelationThreshold": str(_FEW_BYTES),
    }
    with temporary_settings(spark, settings):
        return spark.createDataFrame(rows, spark_schema(schema))


def default_filesystem(spark: SparkSession) -> str | None:
    """The URI against which Spark resolves a path without a scheme; None with Spark Connect."""
    if is_connect(spark):
        return None
    return str(spark.sparkContext._jsc.hadoopConfiguration().get("fs.defaultFS"))


def require_encoding(spark: SparkSession, path: str) -> None:
    """Raise ConfigurationError if the session's JVM cannot name a path of a local disk.

    In the locale ``C``, Java writes ``?`` for each character of a file's name that is not ASCII.
    """
    if path.isascii() or is_connect(spark):
        return
    jvm = spark._jvm
    assert jvm is not None
    encoding = str(jvm.System.getProperty("sun.jnu.encoding"))
    if encoding.upper() not in ("UTF-8", "UTF8"):
        raise ConfigurationError(
            f"could not use table {path!r} with engine='spark': the JVM encodes the names of files "
            f"as {encoding}, expected UTF-8; start the session with LC_ALL=C.UTF-8"
        )
