"""``minRowsPerTrigger`` in Spark: the limit that Spark hands back has its own class."""

from __future__ import annotations

import time
from pathlib import Path

from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.spark.streaming_query import begin, run_to_the_end
from tests.support.wait import wait_until


def test_micro_batches_wait_for_rows(
    spark: SparkSession, shared_server: NatsServer, tmp_path: Path
) -> None:
    url, sizes = shared_server.url, list[int]()
    create_bucket(url, "min_rows", 64)
    put_many(url, "min_rows", [("a", b"0")])
    rows = (
        spark.readStream.format("nats_kv")
        .options(servers=url, bucket="min_rows", includeHistory=True, minRowsPerTrigger=10)
        .load()
    )
    writer = rows.writeStream.foreachBatch(lambda batch, _: sizes.append(batch.count()))
    writer = writer.option("checkpointLocation", str(tmp_path))
    query = begin(writer.start)
    try:
        wait_until(lambda: sizes == [1], "the first micro-batch")
        put_many(url, "min_rows", [("a", b"%d" % number) for number in range(9)])
        # Spark polls many times meanwhile.
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            assert sizes == [1]
            time.sleep(0.05)
        put_many(url, "min_rows", [("a", b"9")])
        wait_until(lambda: sizes == [1, 10], "the second micro-batch")
        wait_until((tmp_path / "commits" / "1").exists, "its commit")
    finally:
        query.stop()
    put_many(url, "min_rows", [("a", b"10")])
    run_to_the_end(writer.trigger(availableNow=True).start)
    assert sizes == [1, 10, 1]
