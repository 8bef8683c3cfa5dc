"""The types of the columns by which rows are found and entries are compared.

**Entries** are ordered by ``stream_created`` and ``revision`` and applied by their ``operation``.
Each engine compares the types of :data:`ENTRY_TYPES` exactly, in the batch and in the table; others
are an error. Texts would be ordered by their digits, and a FLOAT or DATE rounds.

**Keys** have any type, except CHAR: Spark pads a CHAR with spaces where it is stored, not where
MERGE compares it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyspark.sql.types import (
    ByteType,
    DataType,
    DecimalType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from nats_stream_source.errors import ConfigurationError

ENTRY_TYPES: dict[str, tuple[tuple[type[DataType], ...], str]] = {
    "revision": (
        (ByteType, ShortType, IntegerType, LongType, DecimalType),
        "BIGINT, another integer or DECIMAL(p,0)",
    ),
    "stream_created": ((TimestampType, TimestampNTZType), "TIMESTAMP or TIMESTAMP_NTZ"),
    "operation": ((StringType,), "STRING"),
}
"""The types of the columns by which entries are ordered and applied, and what an error expects."""

_CHAR_VARCHAR = "__CHAR_VARCHAR_TYPE_STRING"  # Spark's, in the metadata of a STRING


def validate_entry_types(batch: StructType, columns: Iterable[str]) -> None:
    """Raise ConfigurationError if columns of entries have types that engines compare differently.

    Args:
        batch: the columns of the batch.
        columns: names in :data:`ENTRY_TYPES`.
    """
    for column in columns:
        if (problem := _entry_type_problem(batch[column])) is not None:
            raise ConfigurationError(
                f"could not merge the batch: {problem}; keep the column as the source delivers it"
            )


def require_entry_types(table: str, schema: StructType) -> None:
    """Raise ConfigurationError if a table's columns of entries have other types.

    Args:
        table: path or name, for the message.
        schema: the table's columns, with those of :data:`ENTRY_TYPES`.
    """
    for column in ENTRY_TYPES:
        if (problem := _entry_type_problem(schema[column])) is not None:
            raise ConfigurationError(
                f"could not use table {table!r}: {problem}; replay the bucket into a new table"
            )


def require_exact_keys(table: str, schema: StructType, columns: Sequence[str]) -> None:
    """Raise ConfigurationError if Spark stores other values of a table's key than it compares.

    Args:
        table: path or name, for the message.
        schema: the table's columns.
        columns: that identify and order its rows.
    """
    for field in schema.fields:
        length = declared_length(field)
        if field.name in columns and length.startswith("CHAR"):
            raise ConfigurationError(
                f"could not use table {table!r}: rows are found by column {field.name!r}, which is "
                f"{length}, expected STRING: Spark stores a CHAR with other spaces than it "
                f"compares; copy the table into one with STRING"
            )


def declared_length(field: StructField) -> str:
    """CHAR(n) or VARCHAR(n) if a STRING was declared as one; else empty."""
    return str(field.metadata.get(_CHAR_VARCHAR, "")).upper()


def _entry_type_problem(field: StructField) -> str | None:
    types, expected = ENTRY_TYPES[field.name]
    kind = field.dataType
    exact = type(kind) in types
    if isinstance(kind, DecimalType):
        exact = exact and kind.scale == 0
    elif isinstance(kind, StringType):  # a collation has other rules than the bytes
        exact = exact and kind == StringType()
    if exact:
        return None
    return f"column {field.name!r} is {kind.simpleString().upper()}, expected {expected}"
