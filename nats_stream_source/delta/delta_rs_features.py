"""What of Delta Lake delta-rs does not support: table features and column types."""

from __future__ import annotations

from deltalake import DeltaTable
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
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
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

_TYPES = (
    BinaryType,
    BooleanType,
    ByteType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    NullType,
    ShortType,
    StringType,
    TimestampNTZType,
    TimestampType,
)


def unsupported_feature(target: DeltaTable) -> str | None:
    """Why delta-rs cannot change this table; None if it can."""
    return None


def unsupported_type(schema: StructType) -> str | None:
    """Why delta-rs cannot write these columns; None if it can."""
    for field in schema.fields:
        unsupported = _unsupported(field.dataType)
        if unsupported is not None:
            return (
                f"column '{field.name}' has the type {unsupported.simpleString().upper()}, which "
                f"delta-rs does not write"
            )
    return None


def _unsupported(of: DataType) -> DataType | None:
    """The part of a type that delta-rs does not write."""
    if isinstance(of, StructType):
        parts = [field.dataType for field in of.fields]
    elif isinstance(of, ArrayType):
        parts = [of.elementType]
    elif isinstance(of, MapType):
        parts = [of.keyType, of.valueType]
    else:
        # A string with a collation is compared by other rules than its bytes.
        written = type(of) in _TYPES and (not isinstance(of, StringType) or of == StringType())
        return None if written else of
    return next((found for part in parts if (found := _unsupported(part)) is not None), None)
