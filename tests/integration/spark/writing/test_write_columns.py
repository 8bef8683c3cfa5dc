"""Which DataFrames can be written. Spark parses the columns."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from nats_stream_source.errors import OptionError
from nats_stream_source.rows.columns import ddl as columns_read
from nats_stream_source.spark.writing.columns import validate_columns

GOOD = [
    "key STRING, value STRING",
    "key STRING, value BINARY",
    "key STRING, operation STRING",
    "key STRING, value BINARY, expected_revision INT, ttl SMALLINT",
    columns_read("nats_kv", ("includeHeaders", "includeOrigin", "includeRawKey")),
]
BAD = [
    ("value STRING", "column 'key' is missing, expected key STRING, value BINARY or STRING"),
    ("key INT, value STRING", "column 'key' is INT, expected STRING; cast it"),
    ("key STRING, value STRUCT<a: INT>", "column 'value' is STRUCT<A:INT>, expected BINARY or"),
    ("key STRING, valeu STRING", "column 'valeu' is unknown, .*; rename it to 'value', or select"),
    ("key STRING, value STRING, sequence BIGINT", "column 'sequence' is unknown"),
    ("key STRING, value STRING, ttl DOUBLE", "column 'ttl' is DOUBLE, expected BIGINT"),
    ("key STRING, value STRING, Bucket STRING", "column 'Bucket' is unknown"),
    ("key STRING, key STRING", "column 'key' occurs twice; rename or drop"),
    (
        "key STRING, value STRING, headers MAP<STRING, STRING>",
        "column 'headers' is MAP<STRING,STRING>, expected MAP<STRING, ARRAY<STRING>>",
    ),
]


@pytest.mark.parametrize("ddl", GOOD)
def test_columns_of_bucket(spark: SparkSession, ddl: str) -> None:
    validate_columns(StructType.fromDDL(ddl), "nats_kv")


@pytest.mark.parametrize(("ddl", "problem"), BAD)
def test_refused_columns_of_bucket(spark: SparkSession, ddl: str, problem: str) -> None:
    with pytest.raises(OptionError, match=f"could not write with format 'nats_kv': {problem}"):
        validate_columns(StructType.fromDDL(ddl), "nats_kv")


def test_columns_of_stream(spark: SparkSession) -> None:
    validate_columns(
        StructType.fromDDL(columns_read("nats_stream", ("includeHeaders",))), "nats_stream"
    )
    validate_columns(StructType.fromDDL("data STRING, msg_id STRING"), "nats_stream")
    with pytest.raises(OptionError, match="column 'data' is missing"):
        validate_columns(StructType.fromDDL("subject STRING"), "nats_stream")
