"""Two queries of one session follow two buckets into one table, which neither of them finds."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.delta import follow
from nats_stream_source.embedded import NatsServer
from tests.support.followed import Query, Writer
from tests.support.nats import buckets
from tests.support.spark.streaming_query import begin
from tests.support.wait import wait_until

pytestmark = pytest.mark.delta

BUCKETS = ("a", "b")
BATCHES = 10
_DEADLINE = 180.0  # seconds


@pytest.mark.parametrize("arguments", [{}, {"stored_as_scd_type": 2}], ids=["latest", "history"])
def test_two_queries_follow_into_one_table(
    spark: SparkSession,
    nats_server: NatsServer,
    table: Path,
    caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any],
) -> None:
    url = nats_server.url
    queries = [Query({"bucket": name, "includeHistory": "true"}, arguments) for name in BUCKETS]
    for name in BUCKETS:
        buckets.create_bucket(url, name, 64)
    checkpoints = [table.with_name(f"checkpoint-{name}") for name in BUCKETS]
    writer = Writer(url, BUCKETS, random.Random(1))
    writer.start()
    running: list[StreamingQuery] = []

    def alive() -> None:
        assert [one.exception() for one in running] == [None, None]  # neither has ended

    def batches() -> int:
        return min(len(list(one.glob("commits/[0-9]*"))) for one in checkpoints)

    def conflicts() -> int:
        return sum("another writer changed the table" in one for one in caplog.messages)

    def start(query: Query, checkpoint: Path) -> StreamingQuery:
        source = spark.readStream.format("nats_kv").options(servers=url, **query.options)
        to = str(checkpoint)
        return follow(source.load(), str(table), checkpoint=to, engine="driver", **query.arguments)

    try:
        for query, checkpoint in zip(queries, checkpoints, strict=True):
            running.append(begin(functools.partial(start, query, checkpoint)))
        wait_until(
            lambda: batches() >= BATCHES and conflicts(),
            "micro-batches and a conflict of their commits",
            _DEADLINE,
            alive=alive,
        )
        writer.stop()
        expected = sorted(row for query in queries for row in query.expected(writer.written))
        wait_until(lambda: queries[0].stored(table) == expected, "the rows", _DEADLINE, alive=alive)
        alive()
    finally:
        for one in running:
            one.stop()
