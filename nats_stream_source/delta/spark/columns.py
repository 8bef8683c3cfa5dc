"""Spark's columns as Arrow schemas, the only schema language of the other modules, and back.

A type that Arrow lacks (VARIANT, intervals, strings with a collation, TIME, GEOMETRY, …) is an
opaque type with Spark's name for it, also inside of other types. Of the metadata of a field the
Arrow field has the comment, the declared length of a CHAR or VARCHAR, and Delta Lake's own keys.
"""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.types import (
    ArrayType,
    CharType,
    DataType,
    DecimalType,
    MapType,
    StructField,
    StructType,
    VarcharType,
)

from nats_stream_source.delta.schema import TIMESTAMP, TIMESTAMP_NTZ, opaque_type, sql_type

_DECLARED = "__CHAR_VARCHAR_TYPE_STRING"  # Spark's, in the metadata of a STRING
_ARROW: dict[DataType, pa.DataType] = {
    spark_types.BooleanType(): pa.bool_(),
    spark_types.ByteType(): pa.int8(),
    spark_types.ShortType(): pa.int16(),
    spark_types.IntegerType(): pa.int32(),
    spark_types.LongType(): pa.int64(),
    spark_types.FloatType(): pa.float32(),
    spark_types.DoubleType(): pa.float64(),
    spark_types.StringType(): pa.string(),
    spark_types.BinaryType(): pa.binary(),
    spark_types.DateType(): pa.date32(),
    spark_types.TimestampType(): TIMESTAMP,
    spark_types.TimestampNTZType(): TIMESTAMP_NTZ,
    spark_types.NullType(): pa.null(),
}
_SPARK: dict[str, DataType] = {sql_type(kind): own for own, kind in _ARROW.items()}


def quote(column: str) -> str:
    """The column's name as a quoted SQL identifier, for any characters."""
    return "`" + column.replace("`", "``") + "`"


def arrow_schema(columns: StructType) -> pa.Schema:
    """The Arrow schema of Spark's columns."""
    return pa.schema([_arrow_field(field) for field in columns.fields])


def spark_schema(schema: pa.Schema) -> StructType:
    """Spark's columns of an Arrow schema; of the metadata they have the comments."""
    return StructType([spark_field(field) for field in schema])


def spark_field(field: pa.Field) -> StructField:
    """Spark's column of an Arrow field."""
    comment = (field.metadata or {}).get(b"comment")
    metadata = None if comment is None else {"comment": comment.decode()}
    return StructField(field.name, _spark_type(field.type), field.nullable, metadata)


def nullable(columns: StructType) -> StructType:
    """Columns that can be null; the parts in them are as they were, but those of no type."""
    kinds = (_spark_type(_arrow_type(field.dataType)) for field in columns.fields)
    return StructType(
        [StructField(name, kind, True) for name, kind in zip(columns.names, kinds, strict=True)]
    )


def _arrow_field(field: StructField) -> pa.Field:
    own = (*("comment", _DECLARED), "delta.")
    metadata = {key: str(value) for key, value in field.metadata.items() if key.startswith(own)}
    if isinstance(field.dataType, (CharType, VarcharType)):
        metadata.setdefault(_DECLARED, field.dataType.simpleString())
    return _arrow_part(field.name, field.dataType, field.nullable, metadata or None)


def _arrow_part(
    name: str, kind: DataType, nullable: bool, metadata: dict[str, str] | None = None
) -> pa.Field:
    """A field; one without a type can be null, which that of ``array()`` cannot."""
    of_arrow = _arrow_type(kind)
    return pa.field(name, of_arrow, nullable or pa.types.is_null(of_arrow), metadata)


def _arrow_type(kind: DataType) -> pa.DataType:
    if isinstance(kind, StructType):
        return pa.struct([_arrow_field(field) for field in kind.fields])
    if isinstance(kind, MapType):
        item = _arrow_part("value", kind.valueType, kind.valueContainsNull)
        return pa.map_(_arrow_type(kind.keyType), item)
    if isinstance(kind, ArrayType):
        return pa.list_(_arrow_part("element", kind.elementType, kind.containsNull))
    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, (CharType, VarcharType)):
        return pa.string()
    found = _ARROW.get(kind)
    return opaque_type(kind.simpleString()) if found is None else found


def _spark_type(kind: pa.DataType) -> DataType:
    if pa.types.is_struct(kind):
        return StructType([spark_field(field) for field in kind])
    if pa.types.is_map(kind):
        item = kind.item_field
        return MapType(_spark_type(kind.key_type), _spark_type(item.type), item.nullable)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return ArrayType(_spark_type(kind.value_type), kind.value_field.nullable)
    if pa.types.is_decimal(kind):
        return DecimalType(kind.precision, kind.scale)
    name = sql_type(kind)
    return _SPARK[name] if name in _SPARK else DataType.fromDDL(name)
