"""Spark's columns as Arrow schemas and back: every type, the fields in it and their metadata."""

from __future__ import annotations

import inspect
from typing import cast

import pyarrow as pa
import pytest
from pyspark.sql import types as spark_types
from pyspark.sql.types import (
    ArrayType,
    CharType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VarcharType,
    VariantType,
    YearMonthIntervalType,
)

from nats_stream_source.delta.schema import declared_length, is_opaque, sql_type
from nats_stream_source.delta.spark.columns import arrow_schema, spark_schema

_PLAIN = [kind for kind in vars(spark_types).values() if inspect.isclass(kind)]
_PLAIN = [kind for kind in _PLAIN if issubclass(kind, DataType) and kind.__name__[0] != "_"]
STORED = {
    *("BooleanType", "ByteType", "ShortType", "IntegerType", "LongType", "FloatType"),
    *("DoubleType", "StringType", "BinaryType", "DateType", "TimestampType"),
    *("TimestampNTZType", "NullType", "DecimalType"),
}
LACKED: list[DataType] = [
    VariantType(),
    DayTimeIntervalType(),
    YearMonthIntervalType(),
    spark_types.CalendarIntervalType(),
    StringType("UTF8_LCASE"),
]


def _arrow(kind: DataType) -> pa.DataType:
    return arrow_schema(StructType([StructField("a", kind)])).field("a").type


@pytest.mark.parametrize("kind", [kind for kind in _PLAIN if kind.__name__ in STORED])
def test_type_that_arrow_has_is_same_after_round_trip(kind: type[DataType]) -> None:
    columns = StructType([StructField("a", kind()), StructField("b", ArrayType(kind()))])
    schema = arrow_schema(columns)
    assert spark_schema(schema) == columns
    assert not any(is_opaque(field.type) for field in schema)
    assert sql_type(schema.field("a").type) == kind().simpleString()


@pytest.mark.parametrize("kind", LACKED, ids=lambda kind: kind.simpleString())
def test_type_that_arrow_lacks_is_opaque_also_in_other_types(kind: DataType) -> None:
    assert is_opaque(_arrow(kind))
    assert sql_type(_arrow(kind)) == kind.simpleString()
    for nested in (
        StructType([StructField("x", kind)]),
        ArrayType(kind),
        MapType(StringType(), ArrayType(kind)),
    ):
        assert is_opaque(_arrow(nested))
        assert sql_type(_arrow(nested)) == nested.simpleString()


def test_types_of_spark_have_arrow_types() -> None:
    """A type of a later Spark is opaque, too."""
    for kind in _PLAIN:
        try:
            instance = cast("DataType", kind())
        except TypeError:  # a base class, or one with arguments
            continue
        assert sql_type(_arrow(instance)) == instance.simpleString()


def test_nested_types_keep_order_and_nullability() -> None:
    nested = StructType(
        [
            StructField("z", MapType(LongType(), ArrayType(DecimalType(9, 2), False), False)),
            StructField("a", ArrayType(StructType([StructField("x", TimestampType(), False)]))),
        ]
    )
    columns = StructType([StructField("s", nested, False), StructField("a.b", LongType())])
    assert spark_schema(arrow_schema(columns)) == columns


def test_comment_is_kept_and_other_metadata_is_not_written() -> None:
    inner = StructField("x", LongType(), True, {"comment": "of x"})
    metadata = {"comment": "of s", "delta.identity.step": 1, "other": {"y": 2}}
    columns = StructType([StructField("s", StructType([inner]), True, metadata)])
    field = arrow_schema(columns).field("s")
    assert field.metadata == {b"comment": b"of s", b"delta.identity.step": b"1"}
    back = spark_schema(arrow_schema(columns))["s"]
    assert back.metadata == {"comment": "of s"}
    assert isinstance(back.dataType, StructType)
    assert back.dataType["x"].metadata == {"comment": "of x"}


def test_declared_length_is_known() -> None:
    """Spark has it in the metadata of a STRING, or as a type of its own."""
    metadata = {"__CHAR_VARCHAR_TYPE_STRING": "varchar(3)"}
    inner = StructType([StructField("x", StringType(), True, metadata)])
    columns = [("a", CharType(3)), ("b", VarcharType(4)), ("c", inner), ("d", StringType())]
    schema = arrow_schema(StructType([StructField(name, kind) for name, kind in columns]))
    assert [declared_length(field) for field in schema] == [
        "CHAR(3)",
        "VARCHAR(4)",
        "VARCHAR(3)",
        "",
    ]
    assert schema.field("a").type == pa.string()
