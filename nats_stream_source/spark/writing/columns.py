"""Which columns of a DataFrame are written, and which are ignored.

A column that the format reads can stand in a DataFrame that is written, so that rows that were read
can be written elsewhere: the columns that only reading has are ignored under exactly these names.
Any other column is an error, since a row would lose it without a message.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

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

_INTEGERS = (ByteType, ShortType, IntegerType, LongType)


@dataclass(frozen=True, slots=True)
class WriteColumns:
    """The columns of a format.

    Attributes:
        types: the columns that are written, with their types in words.
        required: those that a DataFrame must have.
        ignored: those that reading adds.
    """

    types: Mapping[str, str]
    required: tuple[str, ...]
    ignored: tuple[str, ...]


KV_COLUMNS = WriteColumns(
    {
        "key": "STRING",
        "value": "BINARY or STRING",
        "operation": "STRING",
        "expected_revision": "BIGINT",
        "ttl": "BIGINT",
        "headers": "MAP<STRING, ARRAY<STRING>>",
    },
    ("key",),
    ("bucket", "revision", "created", "delta", "initial", "stream_created"),
)

STREAM_COLUMNS = WriteColumns(
    {
        "subject": "STRING",
        "data": "BINARY or STRING",
        "headers": "MAP<STRING, ARRAY<STRING>>",
        "msg_id": "STRING",
    },
    ("data",),
    ("stream", "sequence", "timestamp", "stream_created"),
)


def check_columns(schema: StructType, columns: WriteColumns, format_name: str) -> None:
    """Raise OptionError for a DataFrame that cannot be written.

    Args:
        schema: the columns of the DataFrame.
        columns: those of the format.
    """
    failed = f"could not write with format {format_name!r}: "
    expected = ", ".join(f"{name} {kind}" for name, kind in columns.types.items())
    seen: set[str] = set()
    for field in schema:
        name = field.name
        if name in seen:
            raise OptionError(f"{failed}column {name!r} occurs twice; rename or drop one of them")
        seen.add(name)
        if name in columns.ignored:
            continue
        if name not in columns.types:
            near = difflib.get_close_matches(name.lower(), columns.types, n=1)
            hint = f"rename it to {near[0]!r}, or " if near else ""
            raise OptionError(
                f"{failed}column {name!r} is unknown, expected {expected}; {hint}select the "
                f"columns to write"
            )
        expected_type = columns.types[name]
        if not _fits(field.dataType, expected_type):
            to_json = (
                ", or write to_json(...) for several values" if "BINARY" in expected_type else ""
            )
            raise OptionError(
                f"{failed}column {name!r} is {field.dataType.simpleString().upper()}, expected "
                f"{expected_type}; cast it{to_json}"
            )
    for name in columns.required:
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
