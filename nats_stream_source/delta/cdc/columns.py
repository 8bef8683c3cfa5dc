"""Columns of a table and of its batches, which change from batch to batch.

- A column that the table lacks is added to it, null in the rows that it has. So is a field of a
  struct, also in arrays. In a map it is refused: delta-rs cannot read data files from before
  (measured with deltalake 1.6.6).
- A column that a batch lacks keeps its value in rows that are updated, and is null in new ones. A
  field that a struct lacks is null: a struct is one value.
- Columns and fields are matched by name, in any order. Names that differ in case only are refused,
  since Delta Lake and Spark take them for one.
- A type of the batch whose values are values of the table's type is cast. Where the table's type
  would have to be widened, the table's engine must be able to; any other type is refused.
- A column without a type (VOID: all its values are null) is not added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
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

from nats_stream_source.delta.table import quote, stored_type
from nats_stream_source.errors import ConfigurationError

# A value of a type can be stored as each later type of its row without a change.
_WIDER = ((ByteType, ShortType, IntegerType, LongType), (FloatType, DoubleType))
_MAX_PRECISION = 38


def with_new_columns(
    table: str,
    schema: StructType,
    batch: Iterable[StructField],
    widens: Callable[[], bool] | None = None,
) -> StructType:
    """The table's columns with those of a batch; ``schema`` itself if the table has them all.

    Args:
        table: path or name, for the error.
        schema: the table's columns.
        batch: the columns to store.
        widens: returns whether the table's engine can widen the types of its columns; None for an
            engine that never can.

    Raises:
        ConfigurationError: the table cannot store the columns.
    """
    fields, changed = {field.name: field for field in schema.fields}, False
    lower = {name.lower(): name for name in fields}
    for field in batch:
        if isinstance(field.dataType, NullType) and field.name not in fields:
            continue
        other = lower.setdefault(field.name.lower(), field.name)
        if other != field.name:
            raise ConfigurationError(
                f"could not merge the batch into table {table!r}: its column {field.name!r} and "
                f"the table's column {other!r} differ in case only; rename the column of the batch"
            )
        if field.name not in fields:
            fields[field.name] = StructField(
                field.name, stored_type(field.dataType), True, field.metadata
            )
            changed = True
        else:
            own = fields[field.name]
            kind = _united(field.dataType, own.dataType)
            held = kind is not None and _holds(own.dataType, field.dataType)
            if kind is None or not (held or (widens and widens())):
                raise _other_type_error(table, field, own.dataType, widened=kind is not None)
            if kind != own.dataType:
                fields[field.name] = StructField(field.name, kind, own.nullable, own.metadata)
                changed = True
    return StructType(list(fields.values())) if changed else schema


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


def has_ntz(of: DataType) -> bool:
    """Whether a type has a TIMESTAMP_NTZ, which requires a feature of the table."""
    if isinstance(of, StructType):
        return any(has_ntz(field.dataType) for field in of.fields)
    if isinstance(of, ArrayType):
        return has_ntz(of.elementType)
    if isinstance(of, MapType):
        return has_ntz(of.keyType) or has_ntz(of.valueType)
    return isinstance(of, TimestampNTZType)


def _united(given: DataType, own: DataType) -> DataType | None:
    """The type with the values of both, which is ``own`` if it has them all; None if none has."""
    if isinstance(given, StructType) and isinstance(own, StructType):
        fields = {field.name: field for field in own.fields}
        lower = {name.lower(): name for name in fields}
        for field in given.fields:
            kind: DataType | None = stored_type(field.dataType)
            if lower.setdefault(field.name.lower(), field.name) != field.name:
                return None
            if field.name in fields:
                kind = _united(field.dataType, fields[field.name].dataType)
            elif isinstance(kind, NullType):
                continue
            if kind is None:
                return None
            before = fields.get(field.name, field)
            if field.name not in fields or kind != before.dataType:
                fields[field.name] = StructField(field.name, kind, True, before.metadata)
        return StructType(list(fields.values()))
    if isinstance(given, ArrayType) and isinstance(own, ArrayType):
        element = _united(given.elementType, own.elementType)
        return element and ArrayType(element, own.containsNull)
    if isinstance(given, MapType) and isinstance(own, MapType):
        same = all(
            _united(one, other) == other
            for one, other in ((given.keyType, own.keyType), (given.valueType, own.valueType))
        )
        return own if same else None
    if isinstance(given, NullType):
        return own
    if isinstance(given, DecimalType) and isinstance(own, DecimalType):
        scale = max(given.scale, own.scale)
        digits = max(given.precision - given.scale, own.precision - own.scale)
        return DecimalType(digits + scale, scale) if digits + scale <= _MAX_PRECISION else None
    for types in _WIDER:
        if type(given) in types and type(own) in types:
            return max(given, own, key=lambda kind: types.index(type(kind)))
    return own if given == own else None


def _holds(own: DataType, given: DataType) -> bool:
    """Whether no part of a table's type has to be widened for a type that unites with it."""
    if isinstance(given, StructType) and isinstance(own, StructType):
        kinds = {field.name: field.dataType for field in own.fields}
        return all(
            _holds(kinds.get(field.name, field.dataType), field.dataType) for field in given.fields
        )
    if isinstance(given, ArrayType) and isinstance(own, ArrayType):
        return _holds(own.elementType, given.elementType)
    if isinstance(given, MapType) and isinstance(own, MapType):
        return _holds(own.keyType, given.keyType) and _holds(own.valueType, given.valueType)
    return _united(given, own) == own


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


def _other_type_error(
    table: str, field: StructField, own: DataType, *, widened: bool
) -> ConfigurationError:
    hint = ""
    if widened:
        hint = (
            ", or let the engine 'spark' widen the table's (ALTER TABLE … SET TBLPROPERTIES "
            "('delta.enableTypeWidening' = 'true'))"
        )
    return ConfigurationError(
        f"could not merge the batch into table {table!r}: column '{field.name}' is "
        f"{_type_name(field.dataType)} in the batch, expected {_type_name(own)} as in the table; "
        f"cast the column{hint}"
    )


def _type_name(of: DataType) -> str:
    return of.simpleString().upper()
