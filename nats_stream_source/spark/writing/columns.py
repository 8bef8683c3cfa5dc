"""Which columns of a DataFrame are written, and which are ignored.

A column that the format reads can stand in a DataFrame that is written, so that rows that were read
can be written elsewhere (``rows.columns``). Any other column is an error, since a row would lose
it without a message.
"""

from __future__ import annotations

import difflib

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from nats_stream_source.errors import OptionError
from nats_stream_source.rows.columns import ignored_columns, written_columns

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)


def validate_columns(
    schema: StructType, format_name: str, *, required: tuple[str, ...] = ()
) -> None:
    """Raise OptionError for a DataFrame that cannot be written.

    Args:
        schema: the columns of the DataFrame.
        required: columns that the options require, beside those of the format.
    """
    written = written_columns(format_name)
    types = {name: column.type for name, column in written.items()}
    ignored = ignored_columns(format_name)
    failed = f"could not write with format {format_name!r}: "
    expected = ", ".join(f"{name} {kind}" for name, kind in types.items())
    seen: set[str] = set()
    for field in schema:
        name = field.name
        if name in seen:
            raise OptionError(f"{failed}column {name!r} occurs twice; rename or drop one of them")
        seen.add(name)
        if name in ignored:
            continue
        if name not in types:
            near = difflib.get_close_matches(name.lower(), types, n=1)
            hint = f"rename it to {near[0]!r}, or " if near else ""
            raise OptionError(
                f"{failed}column {name!r} is unknown, expected {expected}; {hint}select the "
                f"columns to write"
            )
        expected_type = types[name]
        if not _fits(field.dataType, expected_type):
            to_json = (
                ", or write to_json(...) for several values" if "BINARY" in expected_type else ""
            )
            raise OptionError(
                f"{failed}column {name!r} is {field.dataType.simpleString().upper()}, expected "
                f"{expected_type}; cast it{to_json}"
            )
    for name in (*required, *(name for name, column in written.items() if column.required)):
        if name not in seen:
            raise OptionError(
                f"{failed}column {name!r} is missing, expected {expected}; add it with "
                f"select(... AS {name})"
            )


def _fits(data_type: DataType, kind: str) -> bool:
    if kind == "BIGINT":
        return isinstance(data_type, _INTEGERS)
    if kind.startswith("MAP"):
        return (
            isinstance(data_type, MapType)
            and isinstance(data_type.keyType, StringType)
            and isinstance(data_type.valueType, ArrayType)
            and isinstance(data_type.valueType.elementType, StringType)
        )
    return isinstance(data_type, StringType) or (
        kind.startswith("BINARY") and isinstance(data_type, BinaryType)
    )
