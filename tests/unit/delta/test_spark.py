"""Spark's columns as Arrow schemas and back, and what a session lacks for Spark's engine."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession, types
from pyspark.sql.types import (
    ArrayType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from nats_stream_source.delta.schema import declared_length, is_opaque, sql_type
from nats_stream_source.delta.spark import session
from nats_stream_source.delta.spark.columns import arrow_schema, spark_schema
from nats_stream_source.errors import MissingPackageError
from nats_stream_source.spark.session import (
    DELTA_SETTINGS,
    SMALL_MACHINE,
    configure,
    delta_artifact,
)

_PLAIN = [kind for kind in vars(types).values() if inspect.isclass(kind)]
_PLAIN = [kind for kind in _PLAIN if issubclass(kind, DataType) and kind.__name__[0] != "_"]
STORED = {
    *("BooleanType", "ByteType", "ShortType", "IntegerType", "LongType", "FloatType"),
    *("DoubleType", "StringType", "BinaryType", "DateType", "TimestampType"),
    *("TimestampNTZType", "NullType", "DecimalType"),
}
LACKED: list[DataType] = [
    types.VariantType(),
    types.DayTimeIntervalType(),
    types.YearMonthIntervalType(),
    types.CalendarIntervalType(),
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
    time = StructField("x", types.TimestampType(), False)
    numbers = MapType(LongType(), ArrayType(types.DecimalType(9, 2), False), False)
    times = ArrayType(StructType([time]))
    nested = StructType([StructField("z", numbers), StructField("a", times)])
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
    kinds = types.CharType(3), types.VarcharType(4), inner, StringType()
    schema = arrow_schema(StructType([StructField(kind.typeName(), kind) for kind in kinds]))
    lengths = [declared_length(field) for field in schema]
    assert lengths == ["CHAR(3)", "VARCHAR(4)", "VARCHAR(3)", ""]
    assert schema.types[0] == pa.string()


def with_settings(settings: dict[str, str]) -> Any:
    """A session whose JVM has Delta's jar, with these settings.

    Spark does not start with Delta's jar and one of the settings within the shared session.
    """
    delta = SimpleNamespace(tables=SimpleNamespace(DeltaTable=object()))
    return SimpleNamespace(
        _jvm=SimpleNamespace(io=SimpleNamespace(delta=delta)),
        conf=SimpleNamespace(get=settings.get),
    )


@pytest.mark.parametrize("setting", DELTA_SETTINGS)
def test_missing_setting_is_named(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    assert session.missing(with_settings(DELTA_SETTINGS)) is None
    others = {name: value for name, value in DELTA_SETTINGS.items() if name != setting}
    assert setting in str(session.missing(with_settings(others)))
    several = {**others, setting: f"org.example.Other,{DELTA_SETTINGS[setting]}"}
    assert session.missing(with_settings(several)) is None
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.0")
    assert session.missing(with_settings({})) is None  # it has settings of its own


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert session.missing(with_settings({})) == "the package delta-spark is not installed"
    with pytest.raises(MissingPackageError, match=r"delta-spark is not installed.*\[delta\]"):
        configure(SparkSession.builder, delta=True)


def test_builder_gets_jar_and_settings() -> None:
    builder = configure(SparkSession.Builder(), delta=True, small_machine=True)
    options = builder._options
    assert options.items() >= {**DELTA_SETTINGS, **SMALL_MACHINE}.items()
    assert options["spark.jars.packages"] == delta_artifact()
    without = configure(SparkSession.Builder(), delta=True, download=False)
    assert "spark.jars.packages" not in without._options
