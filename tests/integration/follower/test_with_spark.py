"""A table that a query of Spark and a follower without Spark continue in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.delta import follow
from nats_stream_source.errors import DataLossError
from tests.integration.follower.conftest import Followed
from tests.support.delta import rows
from tests.support.nats import buckets

pytestmark = pytest.mark.spark


def by_spark(spark: SparkSession, followed: Followed, checkpoint: Path, **arguments: Any) -> None:
    """Let a query of Spark read what the bucket has."""
    source = spark.readStream.format("nats_kv").options(servers=followed.url, bucket="fleet")
    if "stored_as_scd_type" in arguments:
        source = source.option("includeHistory", "true")
    query = follow(
        source.load(),
        followed.table,
        checkpoint=checkpoint,
        once=True,
        engine="driver",
        **arguments,
    )
    assert query.awaitTermination(120)


async def test_table_is_continued_by_either_way(
    spark: SparkSession, followed: Followed, tmp_path: Path
) -> None:
    followed.create(5)
    followed.put("a=1", "b=1")
    await followed.once()
    followed.put("a=2")
    by_spark(spark, followed, tmp_path / "checkpoint")
    assert [row["value"] for row in rows(followed.table)] == [b"2", b"1"]
    followed.delete("b")
    followed.put("c=1")
    assert (await followed.once()).rows == 3  # what the query has read is merged again
    by_spark(spark, followed, tmp_path / "checkpoint")
    assert [(row["key"], row["value"]) for row in rows(followed.table)] == [
        ("a", b"2"),
        ("c", b"1"),
    ]


async def test_revisions_that_spark_has_read_are_not_required_again(
    spark: SparkSession, followed: Followed, tmp_path: Path
) -> None:
    """The follower's position is older than what a query has merged meanwhile."""
    followed.create(5)
    followed.put("a=1")
    await followed.once(history=True)
    followed.put("a=2", "a=3")
    by_spark(spark, followed, tmp_path / "checkpoint", stored_as_scd_type=2)
    versions = rows(followed.table)
    followed.put("b=1")
    buckets.api(followed.url, "STREAM.PURGE.KV_fleet", {"seq": 4})
    await followed.once(history=True)
    assert rows(followed.table)[: len(versions)] == versions
    followed.put("b=2", "b=3")
    buckets.api(followed.url, "STREAM.PURGE.KV_fleet", {"seq": 6})
    with pytest.raises(DataLossError):
        await followed.once(history=True)


async def test_table_of_spark_is_taken_over_without_position(
    spark: SparkSession, followed: Followed, tmp_path: Path
) -> None:
    followed.create(5)
    followed.put("a=1", "b=1")
    by_spark(spark, followed, tmp_path / "checkpoint")
    buckets.api(followed.url, "STREAM.PURGE.KV_fleet", {"filter": "$KV.fleet.a"})
    followed.put("c=1")
    await followed.once()
    assert [row["key"] for row in rows(followed.table)] == ["b", "c"]
