"""The formats in Spark SQL, and columns that the user gives: a view works, the rest is refused."""

from __future__ import annotations

import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import create_bucket, put_many

COLUMNS = r"with the given schema: got \(key string\), expected \(bucket STRING, .*remove \.schema"


@pytest.fixture
def options(shared_server: NatsServer, bucket: str) -> dict[str, str]:
    create_bucket(shared_server.url, bucket)
    put_many(shared_server.url, bucket, [("a", b"1"), ("b", b"2")])
    return {"servers": shared_server.url, "bucket": bucket}


def in_sql(options: dict[str, str]) -> str:
    return ", ".join(f"{name} '{value}'" for name, value in options.items())


def test_view_has_entries(spark: SparkSession, options: dict[str, str]) -> None:
    spark.sql(f"CREATE TEMPORARY VIEW entries USING nats_kv OPTIONS ({in_sql(options)})")
    try:
        rows = spark.sql("SELECT key, CAST(value AS STRING) AS value FROM entries ORDER BY key")
        assert [tuple(row) for row in rows.collect()] == [("a", "1"), ("b", "2")]
    finally:
        spark.catalog.dropTempView("entries")


def test_table_error_names_view_to_create(spark: SparkSession, options: dict[str, str]) -> None:
    with pytest.raises(AnalysisException, match="CREATE TEMPORARY VIEW name USING nats_kv"):
        spark.sql(f"CREATE TABLE wrong USING nats_kv OPTIONS ({in_sql(options)})")


def test_columns_unknown_are_refused(spark: SparkSession, options: dict[str, str]) -> None:
    with pytest.raises(AnalysisException, match=COLUMNS):
        spark.read.format("nats_kv").schema("key STRING").options(**options).load().collect()
    stream = spark.readStream.format("nats_kv").schema("key STRING").options(**options).load()
    query = stream.writeStream.format("noop").trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match=COLUMNS):
        query.awaitTermination(60)


@pytest.mark.parametrize("headers", ["false", "true"])
def test_columns_of_format_are_accepted(
    spark: SparkSession, options: dict[str, str], headers: str
) -> None:
    reader = spark.read.format("nats_kv").options(**options, includeHeaders=headers)
    schema = reader.load().schema
    assert reader.schema(schema).load().count() == 2
