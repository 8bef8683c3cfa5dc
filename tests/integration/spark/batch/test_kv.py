"""Batch reads of a bucket: current entries, ranges of revisions, and Spark: SQL, columns, reuse."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.errors import OptionError
from nats_stream_source.spark.runner import close_cached_runners
from tests.support.nats.buckets import (
    bucket_state,
    consumers,
    create_bucket,
    delete,
    fill_bucket,
    purge,
    put_many,
)
from tests.support.nats.cluster import Cluster, lagging
from tests.support.nats.topology import make_mirror
from tests.support.query_driver.batch import (
    batch_reader,
    read_batch,
    revisions,
    rows_of_task,
    tasks_of,
)


@pytest.mark.parametrize("history", [1, 3])
def test_rows_are_last_entry_of_each_key(url: str, bucket: str, history: int) -> None:
    create_bucket(url, bucket, history)
    put_many(url, bucket, [("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b"4"), ("d", b"5")])
    delete(url, bucket, "c")
    purge(url, bucket, "d")
    rows = read_batch(url, bucket=bucket)
    assert [(row["key"], row["operation"], row["value"], row["revision"]) for row in rows] == [
        ("b", "PUT", b"2", 2),
        ("a", "PUT", b"3", 3),
        ("c", "DEL", None, 6),
        ("d", "PURGE", None, 7),
    ]
    assert all(row["initial"] and row["bucket"] == bucket for row in rows)
    assert revisions(read_batch(url, bucket=bucket, ignoreDeletes=True)) == [2, 3]
    assert revisions(read_batch(url, bucket=bucket, keys="a,d")) == [3, 7]
    (row,) = read_batch(url, bucket=bucket, keys="a", metaOnly=True, includeHeaders=True)
    assert (row["value"], row["revision"]) == (None, 3)
    assert "headers" in row
    assert consumers(url, bucket) == []


def test_bucket_mirror(url: str, bucket: str) -> None:
    fill_bucket(url, bucket, [("a", b"1"), ("b", b"1"), ("a", b"2")], 2)
    make_mirror(url, f"KV_{bucket}m", f"KV_{bucket}", max_msgs_per_subject=2)
    rows = read_batch(url, bucket=f"{bucket}m")
    assert [(row["key"], row["revision"]) for row in rows] == [("b", 2), ("a", 3)]
    rows = read_batch(url, bucket=f"{bucket}m", asOfSequence=1)
    assert [(row["key"], row["revision"]) for row in rows] == [("a", 1)]


@pytest.mark.parametrize("history", [1, 2])
def test_lagging_replica_returns_no_old_entry(bucket: str, history: int) -> None:
    """The servers place most consumers on followers, one of which lags."""
    with Cluster(lines=True) as cluster:
        create_bucket(cluster.url, bucket, history, num_replicas=3)
        put_many(cluster.url, bucket, [("a", b"1"), ("b", b"1"), ("c", b"1")])
        with lagging(cluster, f"KV_{bucket}") as one:
            put_many(one.leader.url, bucket, [("a", b"2"), ("d", b"1")])
            for _ in range(4):
                rows = read_batch(one.outside.url, bucket=bucket)
                assert [(row["key"], row["revision"]) for row in rows] == [
                    ("b", 2),
                    ("c", 3),
                    ("a", 4),
                    ("d", 5),
                ]
        close_cached_runners()
        assert consumers(cluster.url, bucket) == []


def test_history_whole_and_from_revision(url: str, bucket: str) -> None:
    fill_bucket(url, bucket, [("a", b"%d" % i) for i in range(3)] + [("b", b"3")], 2)
    assert revisions(read_batch(url, bucket=bucket, includeHistory=True)) == [2, 3, 4]
    assert revisions(read_batch(url, bucket=bucket, startSequence=3)) == [3, 4]
    created = {
        row["revision"]: row["created"]
        for row in read_batch(url, bucket=bucket, includeHistory=True)
    }
    rows = read_batch(url, bucket=bucket, startTime=created[4].isoformat())
    assert revisions(rows) == [4]
    assert all(row["initial"] for row in rows)
    # The sequence after the last one is valid: nothing was written after the last batch.
    assert read_batch(url, bucket=bucket, startSequence=5) == []
    with pytest.raises(OptionError, match=r"'startSequence': 6 lies beyond.*minLastRevision=6"):
        read_batch(url, bucket=bucket, startSequence=6)
    with pytest.raises(OptionError, match=r"'startTime'.*future"):
        read_batch(url, bucket=bucket, startTime="2999-01-01T00:00:00Z")


def test_splits_of_history(url: str, bucket: str) -> None:
    fill_bucket(url, bucket, [(f"k{i % 700}", b"%d" % i) for i in range(2000)], 2)
    expected = revisions(read_batch(url, bucket=bucket, includeHistory=True))
    assert len(expected) == bucket_state(url, bucket)["messages"]
    reader = batch_reader(url, bucket=bucket, includeHistory=True, minPartitions=4)
    tasks = tasks_of(reader)
    assert len(tasks) == 4
    found = [revisions(list(rows_of_task(reader, task))) for task in tasks]
    assert all(found)
    assert list(itertools.chain(*found)) == expected


def test_spark_reads(spark: SparkSession, url: str, bucket: str) -> None:
    fill_bucket(url, bucket, [("a", b"1"), ("b", b"2"), ("a", b"3")], 2)

    def read(**options: Any) -> list[Any]:
        frame = spark.read.format("nats_kv").options(servers=url, bucket=bucket, **options).load()
        rows: list[Any] = frame.select("key", "revision").orderBy("revision").collect()
        return [tuple(row) for row in rows]

    assert read() == [("b", 2), ("a", 3)]
    assert read(asOfSequence=2) == [("a", 1), ("b", 2)]
    assert read(includeHistory=True, minPartitions=2) == [("a", 1), ("b", 2), ("a", 3)]
    put_many(url, bucket, [("a", b"4")])
    with pytest.raises(Exception, match=r"DataLossError: .*of 1 keys \('a'\)"):
        read(asOfSequence=2)
    beyond = "OptionError: could not read .* option 'asOfSequence': 9 lies beyond"
    with pytest.raises(Exception, match=beyond):
        read(asOfSequence=9)
    assert consumers(url, bucket) == []


COLUMNS = r"with the given schema: got \(key string\), expected \(bucket STRING, .*remove \.schema"


@pytest.fixture
def options(url: str, bucket: str) -> dict[str, str]:
    fill_bucket(url, bucket, [("a", b"1"), ("b", b"2")])
    return {"servers": url, "bucket": bucket}


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


KEYS = [f"truck.{number}" for number in range(5)]
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def trucks(spark: SparkSession, url: str, bucket: str) -> Iterator[DataFrame]:
    """A bucket of five keys, in a session that pushes filters to Python sources."""
    fill_bucket(url, bucket, [(key, key.encode()) for key in KEYS])
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, "true")
    reader = spark.read.format("nats_kv").option("servers", url)
    yield reader.option("bucket", bucket).load()
    spark.conf.set(PUSHDOWN, before)


def test_union_and_self_join(trucks: DataFrame) -> None:
    one = trucks.where("key = 'truck.1'")
    assert one.count() == 1
    assert trucks.count() == 5
    assert one.union(trucks.where("revision >= 4")).count() == 3
    assert one.union(trucks).count() == 6
    joined = one.alias("a").join(trucks.alias("b"), on="bucket")
    assert sorted(row.key for row in joined.select("b.key").collect()) == KEYS


# Each pair of filters runs twice in a query of its own: few examples, since each is a Spark job.
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.sampled_from([*KEYS, "revision >= 3", "value is null"]), min_size=2, max_size=3))
def test_filters_belong_to_each_use(trucks: DataFrame, filters: list[str]) -> None:
    for one in filters:
        condition = f"key = '{one}'" if one in KEYS else one
        rows = trucks.where(condition).collect()
        expected = {"revision >= 3": KEYS[2:], "value is null": []}.get(one, [one])
        assert sorted(row.key for row in rows) == expected
