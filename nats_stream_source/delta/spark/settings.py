"""Settings of a session: those of a single command, and those that change what Spark stores.

Spark writes and reads dates and times by settings of the session. With most of them the values stay
the same. With these they do not, and Spark reports nothing (measured with Delta Lake 4.4):

- ``outputTimestampType=TIMESTAMP_MILLIS`` drops microseconds, also of ``stream_created``, by which
  entries are compared.
- The mode ``LEGACY`` shifts dates before 1582 and times before 1900 by days, in files that Spark
  writes for all other readers, and in files of other writers for Spark. ``EXCEPTION`` fails for
  them, when the tables may be created and empty.

Others change what a commit does. With ``txnAppId`` and ``txnVersion`` Delta Lake commits one
command and skips each later one without an error. A table that is created with the default
``appendOnly`` accepts one merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    MapType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from nats_stream_source.delta.cdc.layout import Layout, times_of_entries
from nats_stream_source.errors import ConfigurationError

_OUTPUT = "spark.sql.parquet.outputTimestampType"
_REBASE = tuple(
    f"spark.sql.parquet.{kind}RebaseModeIn{way}"
    for kind in ("datetime", "int96")
    for way in ("Write", "Read")
)
_REBASED = {"LEGACY": "has other days before 1900", "EXCEPTION": "is refused before 1900"}
_TRANSACTION = tuple(f"spark.databricks.delta.write.txn{part}" for part in ("AppId", "Version"))
_APPEND_ONLY = "spark.databricks.delta.properties.defaults.appendOnly"


def require_repeated_commits(spark: SparkSession, table: str) -> None:
    """Raise ConfigurationError if Delta Lake would skip commits of the session.

    Args:
        spark: the session of the table.
        table: path or name, for the message.
    """
    for name in _TRANSACTION:
        if _setting(spark, name):
            problem = f"{name} is set, with which Delta Lake skips the second of two commits"
            raise _error(table, problem, f"unset {name}")


def require_changeable_table(spark: SparkSession, table: str) -> None:
    """Raise ConfigurationError if a table that the session creates could not be merged into.

    Args:
        spark: the session of the table.
        table: path or name, for the message.
    """
    if _setting(spark, _APPEND_ONLY) == "TRUE":
        problem = f"{_APPEND_ONLY} is true, with which a new table accepts one merge"
        raise _error(table, problem, "set it to false")


def require_exact_times(
    spark: SparkSession, table: str, schema: StructType, layout: Callable[[], Layout | None]
) -> None:
    """Raise ConfigurationError if Spark would change dates or times of a table.

    Args:
        spark: the session of the table.
        table: path or name, for the message.
        schema: the table's columns.
        layout: returns the layout of the table; called if a setting requires it.
    """
    columns = list(_times(schema))
    exact = [name for name, kind in columns if not isinstance(kind, DateType)]
    if exact and _setting(spark, _OUTPUT) == "TIMESTAMP_MILLIS":
        problem = (
            f"{_OUTPUT} is TIMESTAMP_MILLIS, with which column {exact[0]!r} loses microseconds"
        )
        raise _error(table, problem, "set it to TIMESTAMP_MICROS")
    for name in _REBASE if columns else ():
        if (mode := _setting(spark, name)) not in _REBASED:
            continue
        # Times of servers are never before 1900.
        recent = times_of_entries(layout(), schema.names)
        old = [column for column, _ in columns if column not in recent]
        if old:
            problem = f"{name} is {mode}, with which column {old[0]!r} {_REBASED[mode]}"
            raise _error(table, problem, "set it to CORRECTED")


@contextmanager
def temporary_setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Set a setting of the session for a block."""
    before = spark.conf.get(name, None)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, before)


def _setting(spark: SparkSession, name: str) -> str:
    return (spark.conf.get(name, None) or "").upper()


def _error(table: str, problem: str, action: str) -> ConfigurationError:
    return ConfigurationError(
        f"could not use table {table!r} with engine='spark': the session's setting {problem}; "
        f"{action}, or use engine='delta-rs'"
    )


def _times(schema: DataType, name: str = "") -> Iterator[tuple[str, DataType]]:
    """The dates and times of columns and of all fields in them, as ``column.field``."""
    if isinstance(schema, StructType):
        for field in schema.fields:
            yield from _times(field.dataType, f"{name}.{field.name}" if name else field.name)
    elif isinstance(schema, ArrayType):
        yield from _times(schema.elementType, name)
    elif isinstance(schema, MapType):
        yield from _times(schema.keyType, name)
        yield from _times(schema.valueType, name)
    elif isinstance(schema, (DateType, TimestampType, TimestampNTZType)):
        yield name, schema
