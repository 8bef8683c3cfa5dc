"""Settings of a session: those of a single command, and those that change what Spark stores.

Spark writes and reads dates and times by settings of the session. With most of them the values stay
the same. With these they do not, and Spark reports nothing (measured with Delta Lake 4.4):

- ``outputTimestampType=TIMESTAMP_MILLIS`` drops microseconds, also of ``stream_created``, by which
  entries are compared.
- The mode ``LEGACY`` shifts dates before 1582 and times before 1900 by days, in files that Spark
  writes for all other readers, and in files of other writers for Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
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

from nats_stream_source.errors import ConfigurationError

_OUTPUT = "spark.sql.parquet.outputTimestampType"
_REBASE = tuple(
    f"spark.sql.parquet.{kind}RebaseModeIn{way}"
    for kind in ("datetime", "int96")
    for way in ("Write", "Read")
)
# Times of servers and of commits, which are never before 1900.
_RECENT = ("created", "stream_created", "valid_from", "valid_to")


def require_exact_times(spark: SparkSession, table: str, schema: StructType) -> None:
    """Raise ConfigurationError if Spark would change dates or times of a table.

    Args:
        spark: the session of the table.
        table: path or name, for the message.
        schema: the table's columns.
    """
    columns = list(_times(schema))
    exact = [name for name, kind in columns if not isinstance(kind, DateType)]
    old = [name for name, _ in columns if name not in _RECENT]
    if exact and _setting(spark, _OUTPUT) == "TIMESTAMP_MILLIS":
        problem = (
            f"{_OUTPUT} is TIMESTAMP_MILLIS, with which column {exact[0]!r} loses microseconds"
        )
        raise _error(table, problem, "TIMESTAMP_MICROS")
    for name in _REBASE if old else ():
        if _setting(spark, name) == "LEGACY":
            problem = f"{name} is LEGACY, with which column {old[0]!r} has other days before 1900"
            raise _error(table, problem, "CORRECTED")


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


def _error(table: str, problem: str, value: str) -> ConfigurationError:
    return ConfigurationError(
        f"could not use table {table!r} with engine='spark': the session's setting {problem}; set "
        f"it to {value}, or use engine='delta-rs'"
    )


def _times(schema: DataType, name: str = "") -> Iterator[tuple[str, DataType]]:
    """The dates and times of columns and of all fields in them, with their names."""
    if isinstance(schema, StructType):
        for field in schema.fields:
            yield from _times(field.dataType, field.name)
    elif isinstance(schema, ArrayType):
        yield from _times(schema.elementType, name)
    elif isinstance(schema, MapType):
        yield from _times(schema.keyType, name)
        yield from _times(schema.valueType, name)
    elif isinstance(schema, (DateType, TimestampType, TimestampNTZType)):
        yield name, schema
