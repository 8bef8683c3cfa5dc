"""Columns of a batch as a Delta table stores and compares them, and what is refused.

**Types.** All parts are nullable. Of the metadata, a column keeps its comment.

**Names.** Delta Lake compares names of fields without case, and a table without column mapping
cannot have some characters in them, which delta-rs would accept. Both are errors before anything is
written, as are types that Delta Lake does not store.

**Entries** are ordered by ``stream_created`` and ``revision`` and applied by their ``operation``.
Each engine compares the types of :data:`ENTRY_TYPES` exactly, in the batch and in the table; others
are an error. Texts would be ordered by their digits, and a FLOAT or DATE rounds.

**Keys** have any type, except CHAR: Spark pads a CHAR with spaces where it is stored, not where
MERGE compares it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DecimalType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from nats_stream_source.errors import ConfigurationError

_NOT_IN_NAMES = " ,;{}()\n\t="
# Tried with Delta Lake 4.4. VOID is a type of a part of a column here: an array's or a map's.
_NOT_STORED = (
    *("void", "time", "interval", "daytimeinterval", "yearmonthinterval"),
    *("geography", "geometry"),
)


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


def stored_field(field: StructField) -> StructField:
    """A column of a batch, or a field in one, as a table has it.

    Of its metadata the table gets the comment. The rest would be rules of another table for this
    one: defaults, expressions of generated columns, invariants, lengths of CHAR.
    """
    comment = {name: text for name, text in field.metadata.items() if name == "comment"}
    return StructField(field.name, stored_type(field.dataType), True, comment)


def stored_type(of: DataType) -> DataType:
    """A type as a table has it: all parts nullable, and structs without fields of no type."""
    if isinstance(of, StructType):
        return StructType(
            [stored_field(field) for field in of.fields if not isinstance(field.dataType, NullType)]
        )
    if isinstance(of, ArrayType):
        return ArrayType(stored_type(of.elementType), True)
    if isinstance(of, MapType):
        return MapType(stored_type(of.keyType), stored_type(of.valueType), True)
    return of


def require_storable_names(table: str, schema: StructType) -> None:
    """Raise ConfigurationError if a table without column mapping cannot have these columns.

    Args:
        table: path or name, for the message.
        schema: the columns that the table is to have.
    """
    for name in (name for struct in _structs(schema) for name in struct.names):
        found = next((one for one in name if one in _NOT_IN_NAMES), None)
        if found is not None or not name:
            problem = f"has {found!r} in its name" if found else "has an empty name"
            raise ConfigurationError(
                f"could not store the columns in table {table!r}: column {name!r} {problem}, which "
                f"Delta Lake does not accept; rename the column, or create the table with column "
                f"mapping (delta.columnMapping.mode = 'name') before the first merge"
            )


def require_distinct_fields(table: str, column: StructField) -> None:
    """Raise ConfigurationError if two fields of a struct in a column have one name for Delta Lake.

    Args:
        table: path or name, for the message.
        column: of a batch.
    """
    for struct in _structs(column.dataType):
        seen: dict[str, str] = {}
        for name in struct.names:
            if (other := seen.get(name.lower())) is not None:
                raise ConfigurationError(
                    f"could not merge the batch into table {table!r}: a struct in column "
                    f"{column.name!r} has the fields {other!r} and {name!r}, whose names Delta "
                    f"Lake does not distinguish; rename or drop one of them"
                )
            seen[name.lower()] = name


def require_storable_type(table: str, name: str, given: DataType, stored: DataType) -> None:
    """Raise ConfigurationError if Delta Lake does not store a type.

    Args:
        table: path or name, for the message.
        name: of the column.
        given: its type in the batch, for the message.
        stored: the type that the table is to have.
    """
    for part in type_parts(stored):
        problem = part.simpleString().upper() if part.typeName() in _NOT_STORED else None
        if isinstance(part, StructType) and not part.fields:
            problem = "a struct without fields of a type"
        if problem is not None:
            raise ConfigurationError(
                f"could not merge the batch into table {table!r}: column {name!r} is "
                f"{given.simpleString().upper()}, and Delta Lake does not store {problem} in it; "
                f"cast or drop the column"
            )


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


def type_parts(of: DataType) -> Iterator[DataType]:
    """A type, and all types in it."""
    yield of
    if isinstance(of, StructType):
        inner = [field.dataType for field in of.fields]
    elif isinstance(of, ArrayType):
        inner = [of.elementType]
    else:
        inner = [of.keyType, of.valueType] if isinstance(of, MapType) else []
    for one in inner:
        yield from type_parts(one)


def _structs(of: DataType) -> Iterator[StructType]:
    return (part for part in type_parts(of) if isinstance(part, StructType))


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
