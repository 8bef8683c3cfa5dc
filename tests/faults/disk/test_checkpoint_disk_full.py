"""A checkpoint on a full disk ends the query with the error; it resumes, with either logs."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.delta import follow
from nats_stream_source.embedded import NatsServer
from tests.integration.delta.table_content import live
from tests.support.nats.buckets import create_bucket, put
from tests.support.nats.tmpfs import small_disk
from tests.support.spark.streaming_query import begin
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

_DEADLINE = 180  # seconds; only a failing test takes that long


@pytest.mark.parametrize("async_progress", [True, False])
def test_checkpoint_disk_full(
    spark: SparkSession, nats_server: NatsServer, tmp_path: Path, async_progress: bool
) -> None:
    url, table, disk = nats_server.url, tmp_path / "table", tmp_path / "disk"
    create_bucket(url, "fleet", 5)
    source = spark.readStream.format("nats_kv").options(servers=url, bucket="fleet")

    def start() -> StreamingQuery:
        return begin(
            lambda: follow(
                source.load(),
                str(table),
                checkpoint=str(disk / "checkpoint"),
                async_progress=async_progress,
            )
        )

    def has(revision: int) -> bool:
        return (table / "_delta_log").exists() and live(table) == {"a": revision}

    with small_disk(disk, 1) as resize:
        with running(start()) as query:
            put(url, "fleet", "a", b"x")
            wait_until(lambda: has(1), "the first entry", _DEADLINE)
            filler = disk / "filler"
            with pytest.raises(OSError, match=r".") as full:
                filler.write_bytes(b"x" * (2 << 20))
            assert full.value.errno == errno.ENOSPC
            put(url, "fleet", "a", b"y")
            with pytest.raises(StreamingQueryException, match="No space left"):
                query.awaitTermination(_DEADLINE)
        resize(16)
        put(url, "fleet", "a", b"z")
        with running(start()):
            wait_until(lambda: has(3), "the entries after the failure", _DEADLINE)


@contextlib.contextmanager
def running(query: StreamingQuery) -> Iterator[StreamingQuery]:
    """Stop the query at the end, before its disk is removed."""
    try:
        yield query
    finally:
        query.stop()
