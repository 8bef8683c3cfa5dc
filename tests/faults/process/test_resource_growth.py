"""Memory, files and connections do not grow in long, idle and repeated queries."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.embedded import NatsServer
from tests.faults.process.conftest import TIMEOUTS, batch_row_counts, open_files
from tests.support.attack_target import peak, resident
from tests.support.leak_check import connections, consumers, nothing_left
from tests.support.nats.buckets import api, create_bucket, publish, put, put_many
from tests.support.nats.streams import create_stream
from tests.support.proxy.fault_proxy import Proxy, subject_of
from tests.support.query_driver.driver import new_query
from tests.support.spark.processes import descendants
from tests.support.spark.streaming_query import run_to_the_end
from tests.support.wait import wait_until

NEW: dict[str, dict[str, Any]] = {
    "kv": {"bucket": "drip", "updatesOnly": True},
    "stream": {"stream": "DRIP", "deliverPolicy": "new"},
}
SUBJECTS = {"kv": "$KV.drip.k", "stream": "drip."}


@pytest.fixture
def drip(server: NatsServer, kind: str) -> Iterator[str]:
    """A bucket or stream with one entry; yields the prefix of its subjects."""
    if kind == "kv":
        create_bucket(server.url, "drip", history=2)
    else:
        create_stream(server.url, "DRIP", "drip.>")
    publish(server.url, [(f"{SUBJECTS[kind]}0", b"first", None)])
    yield SUBJECTS[kind]
    api(server.url, f"STREAM.DELETE.{'KV_drip' if kind == 'kv' else 'DRIP'}")


@pytest.mark.parametrize("kind", ["kv", pytest.param("stream", marks=pytest.mark.faults)])
def test_micro_batches_by_thousand_do_not_grow(server: NatsServer, drip: str, kind: str) -> None:
    """Planned and read in turn, as the driver and a worker do in a long query."""
    rows, before, held = 0, 0, (0, 0)
    with (
        nothing_left(server),
        new_query(server.url, cores=1, **TIMEOUTS, **NEW[kind]) as query,
    ):
        query.start()
        for number in range(1000):
            # Every tenth micro-batch is large enough for a consumer.
            count = 40 if number % 10 == 0 else 1
            publish(server.url, ((f"{drip}{i}", b"v", None) for i in range(count)))
            at = query.seq
            assert query.plan()
            seen = [row.seq for row in query.read().rows]
            assert seen == list(range(at + 1, at + count + 1))
            rows += len(seen)
            # What a driver of tests keeps, and Spark does not.
            query.done.clear()
            del query.offsets[:-1]
            if number == 300:
                before = resident()
                held = open_files(), connections(server)
        grown = resident() - before
        wait_until(
            lambda: open_files() <= held[0] and connections(server) <= held[1],
            f"no more files and connections than {held}",
            seen=lambda: (open_files(), connections(server)),
            deadline=600,
        )
    assert rows == 100 * 40 + 900
    assert grown < 16 << 20


@pytest.mark.parametrize("kind", ["kv", pytest.param("stream", marks=pytest.mark.faults)])
def test_idle_query_does_not_grow(server: NatsServer, drip: str, kind: str) -> None:
    """Thousands of polls of an idle query: memory does not grow, and no consumer is created."""
    asked: Counter[str] = Counter()

    def count_request(frame: bytes) -> bool:
        if frame.startswith(b"PUB "):
            asked[".".join(subject_of(frame).split(".")[2:4])] += 1
        return True

    with (
        nothing_left(server),
        Proxy(server.port, upward=count_request, keep=0) as proxy,
        new_query(proxy.url, cores=1, **TIMEOUTS, **NEW[kind]) as query,
    ):
        at = query.start()

        def poll(times: int) -> None:
            for _ in range(times):
                assert query.latest_offset(at) == at
                assert query.report_latest_offset().items() >= at.items()

        poll(500)
        before = resident()
        asked.clear()
        poll(2500)
        grown = resident() - before
        connected = proxy.connections
    assert asked == {"STREAM.INFO": 2500}
    assert connected == 1
    assert grown < 4 << 20


@pytest.mark.faults
def test_rows_by_million_do_not_grow(server: NatsServer) -> None:
    """Memory depends on the size of a batch, not on the length of the range."""
    create_bucket(server.url, "million")
    for part in range(20):
        put_many(server.url, "million", ((f"k{part}.{i}", b"x" * 100) for i in range(50_000)))
    list(batch_row_counts(server.url))  # allocate what is allocated once
    with peak() as memory:
        assert sum(batch_row_counts(server.url, "million")) == 1_000_000
    assert memory.grown < 160 << 20


@pytest.mark.faults
def test_queries_by_hundred_do_not_grow(
    spark: SparkSession, server: NatsServer, tmp_path: Path
) -> None:
    """Each query starts a planner process; all share the Python workers.

    The formats alternate: the one entry of a bucket, and all messages of a stream.
    """
    create_bucket(server.url, "many")
    create_stream(server.url, "MANY", "many.>")
    published: list[bytes] = []
    held: dict[int, tuple[int, int, int]] = {}
    for number in range(1, 101):
        value = b"%d" % number
        if number % 2:
            put(server.url, "many", "k", value)
            _read_into_memory(spark, server, tmp_path / str(number), "nats_kv", bucket="many")
            assert [row.value for row in spark.table("many").collect()] == [value]
        else:
            publish(server.url, [("many.k", value, None)])
            published.append(value)
            _read_into_memory(spark, server, tmp_path / str(number), "nats_stream", stream="MANY")
            rows = spark.table("many").orderBy("sequence").collect()
            assert [row.data for row in rows] == published
        spark.catalog.dropTempView("many")
        if number in (20, 100):
            # The planner process ends after the query.
            least = held.get(20)
            wait_until(
                lambda least=least: least is None or all(map(int.__le__, _held(server), least)),
                "no more than after 20 queries",
                seen=lambda: (_held(server), held),
                deadline=600,
            )
            held[number] = _held(server)
    wait_until(lambda: not consumers(server), "no consumer is left", deadline=600)


def _read_into_memory(
    spark: SparkSession, server: NatsServer, checkpoints: Path, kind: str, **options: str
) -> None:
    attempts = itertools.count()

    def start() -> StreamingQuery:
        return (
            spark.readStream.format(kind)
            .options(servers=server.url, **options)
            .load()
            # With foreachBatch, PySpark would keep a thread and a socket here for each query.
            .writeStream.format("memory")
            .queryName("many")
            .option("checkpointLocation", str(checkpoints / str(next(attempts))))
            .trigger(availableNow=True)
            .start()
        )

    run_to_the_end(start)


def _held(server: NatsServer) -> tuple[int, int, int]:
    return len(descendants()), open_files(), connections(server)
