"""Columns of a table and of its batches, which change from batch to batch.

- A column that the table lacks is added to it, null in the rows that it has. So is a field of a
  struct, also in arrays.
- A column that a batch lacks keeps its value in rows that are updated, and is null in new ones. A
  field that a struct lacks is null: a struct is one value.
- Columns and fields are matched by name, in any order. Names that differ in case only are refused,
  since Delta Lake and Spark take them for one.
- A type of the batch whose values are values of the table's type is cast. Where a wider type has
  the values of both, the table's column gets it; any other type is refused.
- A column without a type (VOID: all its values are null) is not added. An array or a map of VOID
  and a struct without other fields have values, such as an empty array, so they are refused.

**Wider types.** Delta Lake's feature ``typeWidening`` changes the schema only, and delta-rs, polars
and DuckDB do not read a table that has it (measured with deltalake 1.6.6 and polars 2.1). Without
the feature, each data file must have the types of the schema. Therefore a commit that widens a
column has all data files again, with the wider type. The same holds for the fields of a map's
structs: delta-rs does not read them from files that lack them.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StructField,
    StructType,
    TimestampNTZType,
)

from nats_stream_source.delta.stored_columns import (
    require_distinct_fields,
    require_storable_type,
    stored_field,
    stored_type,
    type_parts,
)
from nats_stream_source.delta.table import TableChangedError, quote
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.logs import field_logger

# A value of a type can be stored as each later type of its row without a change.
_WIDER = (
    (ByteType, ShortType, IntegerType, LongType),
    (ByteType, ShortType, IntegerType, DoubleType),
    (FloatType, DoubleType),
    (DateType, TimestampNTZType),
)
_DIGITS: dict[type[DataType], int] = {ByteType: 3, ShortType: 5, IntegerType: 10, LongType: 19}
_MAX_PRECISION = 38

_log = field_logger(__name__)


def with_new_columns(table: str, schema: StructType, batch: Iterable[StructField]) -> StructType:
    """The table's columns with those of a batch; ``schema`` itself if the table has them all.

    Args:
        table: path or name, for the error.
        schema: the table's columns; none for a table that is to be created.
        batch: the columns to store.

    Raises:
        ConfigurationError: the table cannot store the columns.
    """
    fields, changed = {field.name: field for field in schema.fields}, False
    lower = {name.lower(): name for name in fields}
    for field in batch:
        require_distinct_fields(table, field)
        if isinstance(field.dataType, NullType) and field.name not in fields:
            continue
        other = lower.setdefault(field.name.lower(), field.name)
        if other != field.name:
            raise ConfigurationError(
                f"could not merge the batch into table {table!r}: its column {field.name!r} and "
                f"the table's column {other!r} differ in case only; rename the column of the batch"
            )
        if field.name not in fields:
            fields[field.name] = stored_field(field)
            require_storable_type(table, field.name, field.dataType, fields[field.name].dataType)
            changed = True
        else:
            own = fields[field.name]
            kind = _united(field.dataType, own.dataType)
            if kind is None:
                raise ConfigurationError(
                    f"could not merge the batch into table {table!r}: column '{field.name}' is "
                    f"{_type_name(field.dataType)} in the batch, expected "
                    f"{_type_name(own.dataType)} as in the table; cast the column"
                )
            if kind != own.dataType:
                require_storable_type(table, field.name, field.dataType, kind)
                fields[field.name] = StructField(field.name, kind, own.nullable, own.metadata)
                changed = True
    return StructType(list(fields.values())) if changed else schema


def verify_columns(schema: StructType, expected: StructType) -> None:
    """Raise TableChangedError if another writer has changed the columns of a table meanwhile.

    Versions are compared by the columns that the events have. Events with fewer columns than the
    table would join versions that differ in the others.

    Args:
        schema: the table's columns now.
        expected: those that the events were made for.
    """
    if _types(schema) != _types(expected):
        raise TableChangedError("the table's columns changed")


def _types(schema: StructType) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in schema.fields}


def widened_columns(schema: StructType, new: StructType) -> list[str]:
    """The columns that data files with the columns of ``schema`` have in another type.

    Args:
        schema: the table's columns.
        new: as :func:`with_new_columns` returns them.
    """
    before = {field.name: field.dataType for field in schema.fields}
    return [
        field.name
        for field in new.fields
        if field.name in before and not _grown(before[field.name], field.dataType)
    ]


def log_new_columns(table: str, schema: StructType, new: StructType) -> None:
    """Log the columns of a batch that a table has got.

    Args:
        table: path or name.
        schema: the columns before.
        new: the columns after.
    """
    widened = widened_columns(schema, new)
    before = {field.name: field for field in schema.fields}
    added = [f.name for f in new.fields if before.get(f.name) != f and f.name not in widened]
    if added:
        _log.info("added columns of the batch to the table", table=table, columns=added)
    if widened:
        _log.info("widened columns of the table for the batch", table=table, columns=widened)


def conformed(frame: DataFrame, schema: StructType, added: Iterable[str] = ()) -> DataFrame:
    """The columns of a DataFrame in the order and with the types of a table's.

    Args:
        frame: a column that the table lacks is left out.
        schema: of the table.
        added: columns of the table that are null if the DataFrame lacks them.
    """
    given = {field.name: field.dataType for field in frame.schema.fields}
    given |= {name: NullType() for name in added if name not in given}
    wanted = {field.name: field.dataType for field in schema.fields if field.name in given}
    if list(given) == list(wanted) and all(_same(given[n], kind) for n, kind in wanted.items()):
        return frame
    columns = frame.columns
    return frame.select(
        *(
            _cast(F.col(quote(name)) if name in columns else F.lit(None), given[name], kind).alias(
                name
            )
            for name, kind in wanted.items()
        )
    )


def require_fields(table: str, batch: StructType, own: StructType) -> None:
    """Raise ConfigurationError if a part of a column can be null and is NOT NULL in the table.

    Args:
        table: path or name, for the message.
        batch: the columns of the batch.
        own: the table's columns.
    """
    given = {field.name: field.dataType for field in batch.fields}
    for field in own.fields:
        if field.name in given and _can_be_null(given[field.name], field.dataType):
            raise not_null_error(table, field.name)


def not_null_error(table: str, column: str) -> ConfigurationError:
    """The error for a column with a part that is null and NOT NULL in the table."""
    return ConfigurationError(
        f"could not merge the batch into table {table!r}: a part of column {column!r} that is NOT "
        f"NULL in the table can be null in the batch; drop NOT NULL from the part"
    )


def _can_be_null(given: DataType, own: DataType) -> bool:
    if isinstance(given, StructType) and isinstance(own, StructType):
        fields = {field.name: field for field in given.fields}
        return any(
            (not field.nullable and (field.name not in fields or fields[field.name].nullable))
            or (field.name in fields and _can_be_null(fields[field.name].dataType, field.dataType))
            for field in own.fields
        )
    if isinstance(given, ArrayType) and isinstance(own, ArrayType):
        nulls = given.containsNull and not own.containsNull
        return nulls or _can_be_null(given.elementType, own.elementType)
    if isinstance(given, MapType) and isinstance(own, MapType):
        nulls = given.valueContainsNull and not own.valueContainsNull
        return (
            nulls
            or _can_be_null(given.keyType, own.keyType)
            or _can_be_null(given.valueType, own.valueType)
        )
    return False


def has_ntz(of: DataType) -> bool:
    """Whether a type has a TIMESTAMP_NTZ, which requires a feature of the table."""
    return any(isinstance(part, TimestampNTZType) for part in type_parts(of))


def _united(given: DataType, own: DataType) -> DataType | None:
    """The type with the values of both, which is ``own`` if it has them all; None if none has."""
    if isinstance(given, StructType) and isinstance(own, StructType):
        fields = {field.name: field for field in own.fields}
        lower = {name.lower(): name for name in fields}
        for field in given.fields:
            if lower.setdefault(field.name.lower(), field.name) != field.name:
                return None
            before = fields.get(field.name)
            if before is None:
                if not isinstance(field.dataType, NullType):
                    fields[field.name] = stored_field(field)
                continue
            kind = _united(field.dataType, before.dataType)
            if kind is None:
                return None
            if kind != before.dataType:
                fields[field.name] = StructField(field.name, kind, True, before.metadata)
        return StructType(list(fields.values()))
    if isinstance(given, ArrayType) and isinstance(own, ArrayType):
        element = _united(given.elementType, own.elementType)
        return element and ArrayType(element, own.containsNull)
    if isinstance(given, MapType) and isinstance(own, MapType):
        key = _united(given.keyType, own.keyType)
        value = _united(given.valueType, own.valueType)
        if key is None or value is None:
            return None
        return MapType(key, value, own.valueContainsNull)
    if isinstance(given, NullType):
        return own
    if isinstance(given, DecimalType) or isinstance(own, DecimalType):
        return _united_decimals(given, own)
    for types in _WIDER:
        if type(given) in types and type(own) in types:
            return max(given, own, key=lambda kind: types.index(type(kind)))
    return own if given == own else None


def _united_decimals(given: DataType, own: DataType) -> DataType | None:
    sizes = []
    for kind in (given, own):
        if isinstance(kind, DecimalType):
            sizes.append((kind.precision - kind.scale, kind.scale))
        elif type(kind) in _DIGITS:
            sizes.append((_DIGITS[type(kind)], 0))
        else:
            return None
    digits, scale = (max(parts) for parts in zip(*sizes, strict=True))
    return DecimalType(digits + scale, scale) if digits + scale <= _MAX_PRECISION else None


def _grown(own: DataType, new: DataType) -> bool:
    """Whether a type differs from another one by added fields of structs at most."""
    if isinstance(own, StructType) and isinstance(new, StructType):
        kinds = {field.name: field.dataType for field in own.fields}
        return all(
            _grown(kinds.get(field.name, field.dataType), field.dataType) for field in new.fields
        )
    if isinstance(own, ArrayType) and isinstance(new, ArrayType):
        return _grown(own.elementType, new.elementType)
    return own == new


def _same(given: DataType, own: DataType) -> bool:
    return stored_type(given) == stored_type(own)


def _cast(column: Column, given: DataType, wanted: DataType) -> Column:
    """A column with a table's type: fields of structs by name."""
    if _same(given, wanted):
        return column
    if isinstance(given, StructType) and isinstance(wanted, StructType):
        kinds = {field.name: field.dataType for field in given.fields}
        fields = [
            (
                _cast(column.getField(field.name), kinds[field.name], field.dataType)
                if field.name in kinds
                else F.lit(None).cast(field.dataType)
            ).alias(field.name)
            for field in wanted.fields
        ]
        return F.when(column.isNotNull(), F.struct(*fields))
    if isinstance(given, ArrayType) and isinstance(wanted, ArrayType):
        element, own = given.elementType, wanted.elementType
        return F.transform(column, lambda value: _cast(value, element, own))
    if isinstance(given, MapType) and isinstance(wanted, MapType):
        old, new = (given.keyType, given.valueType), (wanted.keyType, wanted.valueType)
        cast = F.transform_keys(column, lambda key, _: _cast(key, old[0], new[0]))
        return F.transform_values(cast, lambda _, value: _cast(value, old[1], new[1]))
    return column.cast(wanted)


def _type_name(of: DataType) -> str:
    return of.simpleString().upper()
