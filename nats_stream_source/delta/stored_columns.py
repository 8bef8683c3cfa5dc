"""Columns of a batch as a Delta table stores them: types, metadata, and what is refused.

**Types.** All parts are nullable. Of the metadata, a column keeps its comment.

**Names.** Delta Lake compares names of fields without case, and a table without column mapping
cannot have some characters in them, which delta-rs would accept. Both are errors before anything is
written, as are types that Delta Lake does not store.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql.types import ArrayType, DataType, MapType, NullType, StructField, StructType

from nats_stream_source.errors import ConfigurationError

_NOT_IN_NAMES = " ,;{}()\n\t="
# Tried with Delta Lake 4.4. VOID is a type of a part of a column here: an array's or a map's.
_NOT_STORED = (
    *("void", "time", "interval", "daytimeinterval", "yearmonthinterval"),
    *("geography", "geometry"),
)


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
    for part in _parts(stored):
        problem = part.simpleString().upper() if part.typeName() in _NOT_STORED else None
        if isinstance(part, StructType) and not part.fields:
            problem = "a struct without fields of a type"
        if problem is not None:
            raise ConfigurationError(
                f"could not merge the batch into table {table!r}: column {name!r} is "
                f"{given.simpleString().upper()}, and Delta Lake does not store {problem} in it; "
                f"cast or drop the column"
            )


def _parts(of: DataType) -> Iterator[DataType]:
    """A type, and all types in it."""
    yield of
    if isinstance(of, StructType):
        inner = [field.dataType for field in of.fields]
    elif isinstance(of, ArrayType):
        inner = [of.elementType]
    else:
        inner = [of.keyType, of.valueType] if isinstance(of, MapType) else []
    for one in inner:
        yield from _parts(one)


def _structs(of: DataType) -> Iterator[StructType]:
    return (part for part in _parts(of) if isinstance(part, StructType))
