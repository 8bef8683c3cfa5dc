"""One query of several buckets, and one table that equals all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.delta import merge_changes
from nats_stream_source.embedded import NatsServer
from tests.integration.delta.table_content import stored
from tests.support.nats import buckets
from tests.support.query_driver.batch import read_batch
from tests.support.spark.streaming_query import begin

pytestmark = pytest.mark.delta


def test_table_equals_buckets_that_pattern_finds(
    spark: SparkSession, nats_server: NatsServer, table: Path, tmp_path: Path
) -> None:
    """The same keys in each; one bucket is found at a restart, one was created again."""
    url = nats_server.url

    def run(**options: str) -> None:
        rows = spark.readStream.format("nats_kv").options(
            servers=url, bucketPattern="site-.*", **options
        )
        query = begin(
            rows.load()
            .writeStream.foreachBatch(merge_changes(str(table)))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start
        )
        assert query.awaitTermination(600)

    def write(name: str, *keys: str) -> None:
        buckets.put_many(url, name, ((key, f"{name} {key}".encode()) for key in keys))

    def expected() -> list[tuple[str, str, int]]:
        rows = read_batch(url, bucketPattern="site-.*")
        return sorted(
            (row["bucket"], row["key"], row["revision"])
            for row in rows
            if row["operation"] == "PUT"
        )

    def found() -> list[tuple[str, str, int]]:
        return [(row["bucket"], row["key"], row["revision"]) for row in stored(table)]

    for name in ("site-1", "site-2"):
        buckets.create_bucket(url, name, history=3)
        write(name, "a", "b", "c", "a")
    run()
    assert found() == expected()
    buckets.delete(url, "site-1", "b")
    buckets.create_bucket(url, "site-3")
    write("site-3", "a", "b")
    run()
    assert found() == expected()
    assert len(found()) == 7
    buckets.delete_bucket(url, "site-2")
    buckets.create_bucket(url, "site-2")
    write("site-2", "a", "b", "c")
    write("site-3", "c")
    run(failOnDataLoss="false")
    assert found() == expected()
    assert len(found()) == 8
