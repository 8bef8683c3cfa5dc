"""Micro-batches of several streams: limits, initial values, tasks, restarts, ends of a run."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from nats_stream_source.errors import DataLossError, PermissionDeniedError
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.options import Mode, kv_options
from nats_stream_source.rows.formats import KvFormat
from nats_stream_source.spark.reading import split_reader
from nats_stream_source.spark.reading.split_reader import read_splits
from nats_stream_source.wire.framing.frames import Frames
from tests.support.nats.buckets import (
    consumers,
    create_bucket,
    delete_bucket,
    fill_bucket,
    put,
    put_many,
)
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import configured_server, with_user
from tests.support.query_driver.driver import Record, new_query, read_all, sequences_by_stream

pytestmark = pytest.mark.servers


def fill(url: str, **counts: int) -> None:
    """Buckets with so many entries each, one per key."""
    for name, count in counts.items():
        fill_bucket(url, name, ((f"k{i}", b"v" * 100) for i in range(count)))


def up_to(**counts: int) -> dict[str, list[int]]:
    return {name: list(range(1, count + 1)) for name, count in counts.items()}


# -- limits --------------------------------------------------------------------------------------


def test_rows_are_shared_by_lag(url: str) -> None:
    fill(url, big=60, small=20)
    with new_query(url, bucketPattern=".*", maxRowsPerTrigger=8) as query:
        batches = [batch.sequences for batch in query.drain()]
    assert sequences_by_stream(query.records) == up_to(big=60, small=20)
    assert {sum(map(len, batch.values())) for batch in batches} == {8}
    assert [{name: len(rows) for name, rows in batch.items()} for batch in batches[:3]] == [
        {"big": 6, "small": 2}
    ] * 3


def test_limit_below_number_of_buckets_serves_each_in_turn(url: str) -> None:
    counts = {f"b{i}": 4 for i in range(6)}
    fill(url, **counts)
    with new_query(url, bucketPattern=".*", maxRowsPerTrigger=2) as query:
        batches = [batch.sequences for batch in query.drain()]
    assert sequences_by_stream(query.records) == up_to(**counts)
    assert all(sum(map(len, batch.values())) <= 2 for batch in batches)
    assert set().union(*batches[:3]) == counts.keys()


def test_minimum_of_rows_counts_all_buckets(url: str) -> None:
    fill(url, a=1, b=0)
    with new_query(url, buckets="a,b", minRowsPerTrigger=4, maxTriggerDelay=3600) as query:
        assert query.read_sequences() == {"a": [1]}  # the first micro-batch does not wait
        put_many(url, "a", [("1", b""), ("2", b"")])
        assert query.read_sequences() == {}
        put_many(url, "b", [("1", b""), ("2", b"")])
        assert [batch.sequences for batch in query.drain()] == [{"a": [2, 3], "b": [1, 2]}]


# -- initial values ------------------------------------------------------------------------------


def test_initial_values_of_each_bucket(url: str) -> None:
    """One with history, whose last entries are one range as a whole; one without."""
    fill_bucket(url, "deep", ((f"k{i % 3}", b"v") for i in range(9)), history=5)
    fill(url, flat=4)
    with new_query(url, buckets="deep,flat", maxRowsPerTrigger=2) as query:
        batches = [batch.sequences for batch in query.drain()]
        assert batches[0] == {"deep": [7, 8, 9]}  # alone: it takes more than the limit
        put(url, "deep", "k0", b"v")
        put(url, "flat", "k0", b"v")
        assert query.read_sequences() == {"deep": [10], "flat": [5]}
    initial = {(row["bucket"], row["revision"]) for row in query.records if row["initial"]}
    assert initial == {("deep", 7), ("deep", 8), ("deep", 9)} | {("flat", i) for i in range(1, 5)}


def test_initial_values_end_per_bucket_when_one_is_found_later(url: str) -> None:
    fill(url, a=2)
    with new_query(url, bucketPattern=".*", discoveryInterval=1) as query:
        query.read_sequences()
        fill(url, b=2)
        query.read_sequences()
        put(url, "b", "k0", b"v")
        query.read_sequences()
    shown = [(row["bucket"], row["revision"], row["initial"]) for row in query.records]
    assert shown == [
        *(("a", 1, True), ("a", 2, True)),
        *(("b", 1, True), ("b", 2, True), ("b", 3, False)),
    ]


# -- tasks ---------------------------------------------------------------------------------------


def test_small_ranges_share_tasks(url: str) -> None:
    counts = {f"b{i:02}": 5 for i in range(20)}
    fill(url, **counts)
    with new_query(url, bucketPattern=".*", cores=2) as query:
        assert query.read_sequences() == up_to(**counts)
        assert 1 <= len(query.tasks) <= 2
        assert sum(len(splits) for splits in query.tasks) == 20


def test_minimum_of_partitions_is_shared_by_rows(url: str) -> None:
    fill(url, big=300, small=3)
    with new_query(url, bucketPattern=".*", minPartitions=4) as query:
        assert query.read_sequences() == up_to(big=300, small=3)
        assert len(query.tasks) >= 4


def test_repeated_task_reads_same_rows(url: str) -> None:
    fill(url, a=20, b=30)
    with new_query(url, buckets="a,b") as query:
        start = query.offset
        assert query.plan()
        first = query.read().sequences
        put(url, "a", "new", b"v")
        assert query.read_range(start, query.offset) == first == up_to(a=20, b=30)


def test_failed_first_micro_batch_pairs_with_new_initial_offset(url: str) -> None:
    """Spark requests the initial offset again; another bucket may be there by then."""
    fill(url, a=2)
    with new_query(url, bucketPattern=".*", updatesOnly=True) as query:
        query.start()
        put(url, "a", "x", b"v")
        assert query.plan()
        query.read()
        end = query.offset
    put(url, "a", "y", b"v")
    fill(url, b=3)
    with new_query(url, bucketPattern=".*", updatesOnly=True) as restarted:
        assert restarted.read_range(restarted.start(), end) == {"a": [3]}
        restarted.offsets.append(end)
        assert restarted.read_sequences() == {"a": [4], "b": [1, 2, 3]}


# -- Trigger.AvailableNow ------------------------------------------------------------------------


def test_available_now_ends_where_each_bucket_ended(url: str) -> None:
    fill(url, a=3, b=2)
    given: dict[str, Any] = {"bucketPattern": ".*", "discoveryInterval": 1, "maxRowsPerTrigger": 2}
    with new_query(url, **given) as query:
        query.prepare_available_now()
        query.start()
        put(url, "a", "later", b"v")
        fill(url, c=1)
        assert query.read_sequences() == up_to(a=3, b=2)
    with new_query(url, offset=query.offset, **given) as next_run:
        next_run.prepare_available_now()
        assert next_run.read_sequences() == {"a": [4], "c": [1]}


def test_initial_values_of_available_now_end_with_run(url: str) -> None:
    fill_bucket(url, "deep", [("k0", b"v"), ("k0", b"v"), ("k1", b"v")], history=5)
    with new_query(url, buckets="deep") as query:
        query.prepare_available_now()
        query.start()
        put(url, "deep", "later", b"v")
        assert query.read_sequences() == {"deep": [2, 3]}
    with new_query(url, offset=query.offset, buckets="deep") as next_run:
        assert next_run.read_sequences() == {"deep": [4]}


# -- requests and permissions --------------------------------------------------------------------


def test_idle_query_requests_lists(url: str, asked: list[str]) -> None:
    for i in range(300):
        create_stream(url, f"s{i}", f"s{i}")
    with new_query(url, streamPattern="s.*") as query:
        query.read_sequences()
        asked.clear()
        assert not query.plan()
        assert asked == ["STREAM.LIST", "STREAM.LIST"]


DENIED = """
accounts {
  A { jetstream: enabled, users: [
    { user: admin, password: admin }
    { user: reader, password: reader, permissions: { publish: { deny: "$JS.API.STREAM.LIST" } } }
  ] }
}
"""


def test_names_are_read_without_permission_to_list_and_patterns_are_not() -> None:
    with configured_server(DENIED) as server:
        admin = with_user(server.url, "admin")
        fill(admin, a=2, b=3)
        create_bucket(admin, "c")
        reader = {"user": "reader", "password": "reader"}
        with new_query(server.url, buckets="a,b,c", **reader) as query:
            assert query.read_sequences() == up_to(a=2, b=3)
        with pytest.raises(PermissionDeniedError, match=r"STREAM\.LIST"):
            read_all(server.url, bucketPattern=".*", **reader)


# -- a long history ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_writes_are_read_once_and_in_order(url: str, seed: int) -> None:
    """Buckets are created, each is written to, the query restarts: each revision is read once."""
    dice = random.Random(seed)
    written: dict[str, list[int]] = {}
    options = {"bucketPattern": ".*", "discoveryInterval": 1, "includeHistory": True}
    options["maxRowsPerTrigger"] = dice.randint(1, 20)
    query = new_query(url, **options)
    found: dict[str, list[int]] = {}
    try:
        for _ in range(40):
            if len(written) < 8 and dice.random() < 0.3:
                name = f"b{len(written)}"
                create_bucket(url, name, history=64)
                written[name] = []
            for name in dice.sample(sorted(written), min(len(written), 3)):
                written[name] += put_many(
                    url, name, ((f"k{dice.randint(0, 3)}", b"v") for _ in range(dice.randint(1, 6)))
                )
            for _ in range(dice.randint(0, 3)):
                for name, rows in (query.read().sequences if query.plan() else {}).items():
                    found.setdefault(name, []).extend(rows)
            if dice.random() < 0.2:
                offset = query.offset
                query.close()
                query = new_query(url, offset=offset, **options)
        for name, rows in query.read_sequences().items():
            found.setdefault(name, []).extend(rows)
    finally:
        query.close()
    assert found == {name: rows for name, rows in written.items() if rows}


NAMES = [f"b{i:02}" for i in range(12)]


@pytest.fixture
def twelve(url: str) -> str:
    """The address of a server with twelve buckets of 100 entries: more than a small range."""
    for name in NAMES:
        fill_bucket(url, name, ((f"k{i}", b"v") for i in range(100)))
    return url


@pytest.mark.parametrize("long", [False, True], ids=["short ranges", "long ranges"])
def test_rows_come_split_by_split(twelve: str, monkeypatch: pytest.MonkeyPatch, long: bool) -> None:
    """Ranges that count as long are read one at a time; the rows are the same."""
    if long:
        monkeypatch.setattr(split_reader, "_MAX_AHEAD_SEQUENCES", 50)
    open_now, most = 0, 0
    original = OrderedReader.batches

    async def counted(reader: OrderedReader) -> AsyncGenerator[Frames, None]:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        async for frames in original(reader):
            yield frames
        open_now -= 1

    monkeypatch.setattr(OrderedReader, "batches", counted)
    with new_query(twelve, bucketPattern="b.*", cores=1) as query:
        assert query.read_sequences() == {name: list(range(1, 101)) for name in NAMES}
        (task,) = query.tasks
        ordered = [split.range.stream for split in task]
        assert [f"KV_{row['bucket']}" for row in query.records[::100]] == ordered
    assert open_now == 0
    assert most == 1 if long else most > 1
    assert not any(consumers(twelve, name) for name in NAMES)


def test_task_that_ends_early_deletes_its_consumers(twelve: str) -> None:
    """As when Spark cancels a task, or a ``LIMIT`` needs no more rows."""
    options = kv_options({"servers": twelve, "bucketPattern": "b.*"}, Mode.STREAMING)
    with new_query(twelve, bucketPattern="b.*", cores=1) as query:
        query.read_sequences()
        (task,) = query.tasks
        rows = read_splits(task, KvFormat(options))
        first = next(iter(rows))
        assert first.num_rows == 100
        rows.close()  # type: ignore[attr-defined]
    assert not any(consumers(twelve, name) for name in NAMES)


def test_split_that_fails_ends_task_when_it_is_its_turn(
    twelve: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    options = kv_options({"servers": twelve, "bucketPattern": "b.*"}, Mode.STREAMING)
    with new_query(twelve, bucketPattern="b.*", cores=1) as query:
        query.read_sequences()
        (task,) = query.tasks
        delete_bucket(twelve, NAMES[2])
        create_bucket(twelve, NAMES[2])
        put_many(twelve, NAMES[2], ((f"k{i}", b"v") for i in range(100)))
        rows: list[Record] = []
        batches = read_splits(task, KvFormat(options))
        with pytest.raises(DataLossError, match=rf"KV_{NAMES[2]}.*re-created"):
            rows.extend(row for batch in batches for row in batch.to_pylist())
    assert sequences_by_stream(rows).keys() <= {*NAMES[:3]}
    assert sequences_by_stream(rows)[NAMES[1]] == list(range(1, 101))
    assert not any(consumers(twelve, name) for name in NAMES)
    assert not caplog.records  # no exception of a split that nobody waited for


def test_bucket_deleted_while_task_reads(twelve: str, caplog: pytest.LogCaptureFixture) -> None:
    """A data loss: an error that names it, or without ``failOnDataLoss`` the rows of the others."""
    given = {"servers": twelve, "bucketPattern": "b.*"}
    with new_query(twelve, bucketPattern="b.*", cores=1) as query:
        query.read_sequences()
        (task,) = query.tasks
        delete_bucket(twelve, NAMES[2])
        with pytest.raises(DataLossError, match=rf"KV_{NAMES[2]}.*was deleted while the range"):
            list(read_splits(task, KvFormat(kv_options(given, Mode.STREAMING))))
        accepting = kv_options({**given, "failOnDataLoss": "false"}, Mode.STREAMING)
        batches = list(read_splits(task, KvFormat(accepting)))
    found = sequences_by_stream([row for batch in batches for row in batch.to_pylist()])
    assert found == {name: list(range(1, 101)) for name in NAMES if name != NAMES[2]}
    assert f"data loss accepted: stream KV_{NAMES[2]}" in caplog.text
