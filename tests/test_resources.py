"""Nothing is left behind, and nothing grows: consumers, connections, tasks, files, memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from attack.victim import peak, read, resident
from buckets import api, create_bucket, delete_bucket, publish, put, put_many
from faults.proxy import Proxy, is_delivery, subject_of
from leftovers import Held, connections, consumers, descendants, nothing_left
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery
from queries import run_to_the_end
from scenario import eventually

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import NatsSourceError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.connection import ConnectionSettings
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.range_request import RangeRequest
from nats_stream_source.options import Mode, kv_options, stream_options
from nats_stream_source.source.planner import Planner
from nats_stream_source.source.query import Query, query_of
from nats_stream_source.source.reader import read_split
from nats_stream_source.source.runtime import Runner, drop_kept_runners
from nats_stream_source.wire.columns import ack_tokens

ROWS = 3000
VALUE = b"x" * 8000
CONSUMER = {
    "stream_name": "KV_full",
    "config": {"name": "left", "ack_policy": "none", "inactive_threshold": 3600 * 10**9},
}


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """Its bucket ``full`` has ``ROWS`` values of 8 KB: three batches, and much flow control."""
    with NatsServer() as server:
        create_bucket(server.url, "full", history=2)
        put_many(server.url, "full", ((f"k{i}", VALUE) for i in range(ROWS)))
        yield server


# -- nothing is left ----------------------------------------------------------------------------


def all_rows(server: NatsServer) -> None:
    assert len(read(server.url, bucket="full", includeHistory=True)) == ROWS


def current_values(server: NatsServer) -> None:
    assert len(read(server.url, bucket="full")) == ROWS


def a_few(server: NatsServer) -> None:
    assert len(read(server.url, bucket="full", startSequence=ROWS - 2)) == 3


def several_splits(server: NatsServer) -> None:
    assert len(read(server.url, bucket="full", includeHistory=True, minPartitions=4)) == ROWS


def no_bucket(server: NatsServer) -> None:
    with pytest.raises(NatsSourceError):
        read(server.url, bucket="none")


def nobody_there(server: NatsServer) -> None:
    with pytest.raises(NatsSourceError):
        read("nats://127.0.0.1:1", bucket="full", connectTimeout=0.3)


def stopped_in_the_middle(server: NatsServer) -> None:
    """``limit()``, or a task that is killed: the generator is closed."""
    batches = _batches(server.url)
    assert 0 < next(batches) < ROWS / 2
    assert consumers(server), "it is in the middle"
    batches.close()


def a_row_that_is_none(server: NatsServer) -> None:
    """The task fails on what it reads."""
    with (
        Proxy(server.port, lambda f: f.replace(b"$KV.full.", b"$KV.fool.", 1), keep=0) as proxy,
        pytest.raises(NatsSourceError, match="does not begin"),
    ):
        read(proxy.url, bucket="full", includeHistory=True)


def lost_messages(server: NatsServer) -> None:
    lost = 0

    def verdict(frame: bytes) -> bool:
        nonlocal lost
        lost += (drop := is_delivery(frame) and lost < 3)
        return not drop

    with Proxy(server.port, verdict, keep=0) as proxy:
        assert len(read(proxy.url, bucket="full", includeHistory=True)) == ROWS
    assert lost == 3


def a_lost_connection(server: NatsServer) -> None:
    with Proxy(server.port, keep=0) as proxy:
        batches = _batches(proxy.url)
        count = next(batches)
        before = proxy.connections
        proxy.cut()
        assert count + sum(batches) == ROWS
        assert proxy.connections > before


def a_server_that_is_restarted(server: NatsServer) -> None:
    batches = _batches(server.url)
    count = next(batches)
    server.kill()
    server.start()
    assert count + sum(batches) == ROWS


def a_bucket_that_is_deleted(server: NatsServer) -> None:
    create_bucket(server.url, "gone")
    put_many(server.url, "gone", ((f"k{i}", VALUE) for i in range(ROWS)))
    batches = _batches(server.url, "gone")
    assert next(batches)
    delete_bucket(server.url, "gone")
    with pytest.raises(NatsSourceError):
        list(batches)


SCENARIOS: tuple[Callable[[NatsServer], None], ...] = (
    all_rows,
    current_values,
    a_few,
    several_splits,
    no_bucket,
    nobody_there,
    stopped_in_the_middle,
    a_row_that_is_none,
    lost_messages,
    a_lost_connection,
    a_server_that_is_restarted,
    a_bucket_that_is_deleted,
)


async def _no_rest(seconds: float) -> None:
    pass


@contextlib.contextmanager
def asking(
    url: str, *, clock: Callable[[], float] | None = None, **options: Any
) -> Iterator[tuple[Runner, Planner, Query]]:
    """A planner as Spark's driver has one, on one core: a range of any length is one split.

    Args:
        clock: instead of the real one; then it does not rest between two looks either.
    """
    given = {"servers": url, "connectTimeout": "20", "requestTimeout": "20", **options}
    parse = stream_options if "stream" in options else kv_options
    query = query_of(parse({k: str(v) for k, v in given.items()}, Mode.STREAMING))
    runner = Runner(query.connection)
    own = {} if clock is None else {"clock": clock, "sleep": _no_rest}
    try:
        yield runner, Planner(query, runner.link, cores=1, **own), query
    finally:
        runner.close()
        drop_kept_runners()


def _batches(url: str, bucket: str = "full") -> Generator[int, None, None]:
    """The row counts of a query's record batches, one by one, as Spark asks for them."""
    with asking(url, bucket=bucket, includeHistory=True) as (runner, planner, query):
        start = runner.run(planner.initial())
        end = runner.run(planner.latest(start, None))
        (plan,) = runner.run(planner.plans(start, end))
        reading = read_split(plan, query)
        with contextlib.closing(reading):  # type: ignore[type-var]
            for batch in reading:
                yield batch.num_rows


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_is_left(server: NatsServer, scenario: Callable[[NatsServer], None]) -> None:
    with nothing_left(server):
        scenario(server)


def test_what_is_left_is_found(server: NatsServer) -> None:
    """The counting itself counts: a consumer, a connection, files, a thread, a child."""
    over = threading.Event()
    before = Held.at_rest(server)
    with contextlib.ExitStack() as stack:
        api(server.url, "CONSUMER.CREATE.KV_full.left", CONSUMER)
        stack.callback(api, server.url, "CONSUMER.DELETE.KV_full.left")
        stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        thread = threading.Thread(target=over.wait, name="left")
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        child = subprocess.Popen(["sleep", "infinity"])
        stack.callback(child.wait)
        stack.callback(child.kill)
        eventually(lambda: connections(server), "the server has accepted the connection")
        found = Held.now(server).more(before)
        assert found.keys() == {field.name for field in fields(Held)}
        assert found["consumers"] == ["KV_full left"]
        assert found["threads"] == ["left"]
        assert found["children"] == [child.pid]


# -- nothing grows ------------------------------------------------------------------------------


NEW: dict[str, dict[str, Any]] = {
    "kv": {"bucket": "drip", "updatesOnly": True},
    "stream": {"stream": "DRIP", "deliverPolicy": "new"},
}
SUBJECTS = {"kv": "$KV.drip.k", "stream": "drip."}


@pytest.fixture
def drip(server: NatsServer, kind: str) -> Iterator[str]:
    """A bucket or stream with one entry; the beginning of its subjects."""
    if kind == "kv":
        create_bucket(server.url, "drip", history=2)
    else:
        api(server.url, "STREAM.CREATE.DRIP", {"name": "DRIP", "subjects": ["drip.>"]})
    publish(server.url, [(f"{SUBJECTS[kind]}0", b"first", None)])
    yield SUBJECTS[kind]
    api(server.url, f"STREAM.DELETE.{'KV_drip' if kind == 'kv' else 'DRIP'}")


@pytest.mark.parametrize("kind", ["kv", pytest.param("stream", marks=pytest.mark.faults)])
def test_a_thousand_micro_batches(server: NatsServer, drip: str, kind: str) -> None:
    """Planned and read one after the other, as the driver and a worker do it for days."""
    rows, before, held = 0, 0, (0, 0)
    with nothing_left(server), asking(server.url, **NEW[kind]) as asked:
        runner, planner, query = asked
        at = runner.run(planner.initial())

        async def write(count: int) -> None:
            connection = await runner.link.connection()
            subjects = (f"{drip}{i}" for i in range(count))
            await asyncio.gather(*(connection.request(subject, b"v") for subject in subjects))

        for number in range(1000):
            # Every tenth is one that a consumer has to read.
            count = 40 if number % 10 == 0 else 1
            runner.run(write(count))
            end = runner.run(planner.latest(at, None))
            seen = []
            for plan in runner.run(planner.plans(at, end)):
                for batch in read_split(plan, query):
                    seen += batch.column("revision" if kind == "kv" else "sequence").to_pylist()
            assert seen == list(range(at.stream_seq + 1, at.stream_seq + count + 1))
            at = end
            rows += len(seen)
            if number == 300:
                before = resident()
                held = open_files(), connections(server)
        grown = resident() - before
        eventually(
            lambda: open_files() <= held[0] and connections(server) <= held[1],
            f"no more files and connections than {held}",
            seen=lambda: (open_files(), connections(server)),
        )
    assert rows == 100 * 40 + 900
    assert grown < 16 << 20


@pytest.mark.parametrize("kind", ["kv", pytest.param("stream", marks=pytest.mark.faults)])
def test_nobody_writes(server: NatsServer, drip: str, kind: str) -> None:
    """Thousands of looks of an idle query: memory stays, and no consumer is asked for."""
    asked: Counter[str] = Counter()

    def note(frame: bytes) -> bool:
        if frame.startswith(b"PUB "):
            asked[".".join(subject_of(frame).split(".")[2:4])] += 1
        return True

    clock = itertools.count(0.0, 1.0).__next__  # the next look is always due
    with (
        nothing_left(server),
        Proxy(server.port, upward=note, keep=0) as proxy,
        asking(proxy.url, clock=clock, **NEW[kind]) as (runner, planner, _),
    ):
        at = runner.run(planner.initial())

        def look(times: int) -> None:
            for _ in range(times):
                assert runner.run(planner.latest(at, None)) == at
                assert planner.newest() == at

        look(500)
        before = resident()
        asked.clear()
        look(2500)
        grown = resident() - before
        connected = proxy.connections
    assert asked == {"STREAM.INFO": 2500}
    assert connected == 1
    assert grown < 4 << 20


def test_a_reader_that_pauses_longer_than_all_timers(server: NatsServer) -> None:
    """Nothing runs meanwhile, as while Spark does not ask for more: paused time is no silence."""
    # A second, since a server that gets no processor for three intervals has fallen silent indeed.
    got, rebuilds = _paused(server.url, heartbeat=1.0, pause=3.5)
    assert got == list(range(1, ROWS + 1))
    assert rebuilds == []


@pytest.mark.faults
def test_a_reader_that_pauses_for_minutes(server: NatsServer) -> None:
    """Longer than a server waits for a write, and keeps a consumer that nobody listens to."""
    create_bucket(server.url, "backlog")
    large = b"x" * 50_000
    for part in range(4):
        put_many(server.url, "backlog", ((f"k{part}.{i}", large) for i in range(500)))
    with peak() as memory:
        got, _ = _paused(server.url, bucket="backlog", end=2000, heartbeat=0.5, pause=180.0)
    assert got == list(range(1, 2001))
    assert memory.grown < 256 << 20


def _paused(
    url: str, *, heartbeat: float, pause: float, bucket: str = "full", end: int = ROWS
) -> tuple[list[int], list[Any]]:
    """Read a range, and run no event loop for ``pause`` seconds after the first batch."""
    runner = Runner(ConnectionSettings(servers=(url,), connect_timeout=20.0, request_timeout=20.0))
    try:

        async def look() -> str:
            jetstream = JetStream(await runner.link.connection())
            return (await jetstream.stream_info(f"KV_{bucket}")).created

        request = RangeRequest(
            stream=f"KV_{bucket}",
            created=runner.run(look()),
            start=0,
            end=end,
            heartbeat=heartbeat,
            batch_rows=100,
        )
        reader = OrderedReader(runner.link, request)
        got: list[int] = []
        with contextlib.closing(runner.iterate(reader.batches())) as batches:
            for frames in batches:
                if not got:
                    time.sleep(pause)
                got += ack_tokens(frames).stream_seq.tolist()
        return got, reader.cursor.rebuilds
    finally:
        runner.close()


@pytest.mark.faults
def test_a_million_rows(server: NatsServer) -> None:
    """Memory is that of a batch, whatever the length of the range."""
    create_bucket(server.url, "million")
    for part in range(20):
        put_many(server.url, "million", ((f"k{part}.{i}", b"x" * 100) for i in range(50_000)))
    list(_batches(server.url))  # warm
    with peak() as memory:
        assert sum(_batches(server.url, "million")) == 1_000_000
    assert memory.grown < 160 << 20


# -- Spark --------------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_hundred_queries_in_one_session(
    spark: SparkSession, server: NatsServer, tmp_path: Path
) -> None:
    """Each with a planner process of its own, all with the same Python workers.

    The two formats in turn: a bucket's one entry, and all messages of a stream.
    """
    create_bucket(server.url, "many")
    api(server.url, "STREAM.CREATE.MANY", {"name": "MANY", "subjects": ["many.>"]})
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
            # The planner's process ends after the query does.
            least = held.get(20)
            eventually(
                lambda least=least: least is None or all(map(int.__le__, _held(server), least)),
                "as much as after 20 queries",
                seen=lambda: (_held(server), held),
            )
            held[number] = _held(server)
    eventually(lambda: not consumers(server), "no consumer is left")


def _read_into_memory(
    spark: SparkSession, server: NatsServer, checkpoints: Path, kind: str, **options: str
) -> None:
    """Into the table ``many``, by ``Trigger.AvailableNow``."""
    attempts = itertools.count()

    def start() -> StreamingQuery:
        return (
            spark.readStream.format(kind)
            .options(servers=server.url, **options)
            .load()
            # Not foreachBatch, for which PySpark keeps a thread and a socket here for each query.
            .writeStream.format("memory")
            .queryName("many")
            .option("checkpointLocation", str(checkpoints / str(next(attempts))))
            .trigger(availableNow=True)
            .start()
        )

    run_to_the_end(start)


def _held(server: NatsServer) -> tuple[int, int, int]:
    """Processes below this one, this process's files, and the server's connections."""
    return len(descendants()), open_files(), connections(server)


def open_files() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))
