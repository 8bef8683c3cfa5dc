"""Checks of the columns of events: types that can be compared, names that are not reserved."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    NumericType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from nats_stream_source.delta.cdc.layout import UNAVAILABLE, Layout
from nats_stream_source.errors import ConfigurationError

_NAMES = "array<string>"
_ORDERED = (
    NumericType,
    StringType,
    BinaryType,
    BooleanType,
    DateType,
    TimestampType,
    TimestampNTZType,
)


def validate_types(layout: Layout, schema: StructType) -> None:
    """Raise ConfigurationError if a key or sequence has a type that cannot be compared.

    Args:
        layout: of the table.
        schema: of the events.
    """
    for name in layout.keys:
        kind = schema[name].dataType
        if not _is_atomic(kind):
            raise ConfigurationError(
                f"could not merge the batch: the key {name!r} is {kind.simpleString().upper()}, "
                f"expected a number, text, binary, boolean, date or time; cast it or pick another"
            )
    for name in layout.order:
        kind = schema[name].dataType
        if not _is_ordered(kind):
            raise ConfigurationError(
                f"could not merge the batch: sequence_by is {kind.simpleString().upper()}, which "
                f"cannot be ordered; expected numbers, texts, binaries, booleans, dates or times, "
                f"or structs of them"
            )
    if UNAVAILABLE in schema.names and schema[UNAVAILABLE].dataType.simpleString() != _NAMES:
        raise ConfigurationError(
            f"could not merge the batch: unavailable_columns is a column of type "
            f"{schema[UNAVAILABLE].dataType.simpleString().upper()}, expected {_NAMES.upper()}"
        )


def _is_ordered(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return bool(kind.fields) and all(_is_ordered(field.dataType) for field in kind.fields)
    return _is_atomic(kind)


def _is_atomic(kind: DataType) -> bool:
    # A string with a collation is compared by other rules than its bytes.
    if isinstance(kind, StringType):
        return kind == StringType()
    return isinstance(kind, _ORDERED)


def validate_names(layout: Layout, selected: Iterable[str]) -> None:
    """Raise ConfigurationError if a selected column has a name that is reserved for the table."""
    # Delta Lake and Spark compare names without case.
    names = {name.lower(): name for name in selected}
    for reserved in layout.reserved():
        if reserved.lower() in names:
            raise ConfigurationError(
                f"could not merge the batch: it has a column {names[reserved.lower()]!r}, and "
                f"{reserved!r} is reserved for the table's own; rename the column, or exclude it "
                f"with except_column_list"
            )
