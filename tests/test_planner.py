"""The planner against a real server, without Spark."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from buckets import (
    api,
    consumers,
    create_bucket,
    delete_bucket,
    put,
    put_many,
    stream_state,
)

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    BucketNotFoundError,
    DataLossError,
    MinLastSequenceError,
    OffsetError,
    UnsupportedStreamError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.link import Link
from nats_stream_source.options import kv_options
from nats_stream_source.source import counts, ranges
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.planner import Planner
from nats_stream_source.source.query import query_of

pytestmark = pytest.mark.servers

T = TypeVar("T")


@asynccontextmanager
async def planning(
    url: str,
    bucket: str,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    cores: int = 2,
    **options: str,
) -> AsyncIterator[Planner]:
    parsed = kv_options({"servers": url, "bucket": bucket, **options})
    link = Link(parsed.connection)
    # A clock that jumps a second with every look never rests.
    ticks = iter(range(10**9))
    # Ranks take no time, so that no answer hangs on how busy the machine is.
    jumps, no_time = (lambda: float(next(ticks))), (lambda: 0.0)
    try:
        yield Planner(query_of(parsed), link, clock or jumps, sleep, cores, no_time)
    finally:
        await link.drop()


def plan(
    url: str,
    bucket: str,
    work: Callable[[Planner], Coroutine[Any, Any, T]],
    cores: int = 2,
    **options: str,
) -> T:
    async def whole() -> T:
        async with planning(url, bucket, cores=cores, **options) as planner:
            return await work(planner)

    return asyncio.run(whole())


async def ends(planner: Planner, limit: int | None = None) -> list[int]:
    """The ends of all micro-batches from the query's beginning on, until nothing is left."""
    start = await planner.initial()
    found: list[int] = []
    for _ in range(1000):
        end = await planner.latest(start, limit)
        if end == start:
            return found
        found.append(end.stream_seq)
        start = end
    raise AssertionError("no end")


BEGINNINGS: dict[str, tuple[dict[str, str], int, int]] = {
    "default": ({}, 0, 20),
    "full history": ({"includeHistory": "true"}, 0, 20),
    "updates only": ({"updatesOnly": "true"}, 20, 20),
    "from a sequence": ({"startSequence": "15"}, 14, 20),
    "from a sequence to come": ({"startSequence": "31"}, 30, 30),
}


@pytest.mark.parametrize(("options", "origin", "through"), BEGINNINGS.values(), ids=BEGINNINGS)
def test_beginnings(
    nats_server: NatsServer, options: dict[str, str], origin: int, through: int
) -> None:
    create_bucket(nats_server.url, "b", history=5)
    put_many(nats_server.url, "b", ((f"k{i % 4}", b"v") for i in range(20)))

    async def work(planner: Planner) -> tuple[Offset, Offset]:
        first = await planner.initial()
        await asyncio.to_thread(put, nats_server.url, "b", "later", b"v")
        return first, await planner.initial()

    first, again = plan(nats_server.url, "b", work, **options)
    assert (first.origin, first.stream_seq, first.initial_through) == (origin, origin, through)
    assert again == first  # decided once


def test_initial_values_of_a_bucket_with_history_are_one_batch(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=5)
    put_many(nats_server.url, "b", ((f"k{i % 4}", b"v") for i in range(20)))

    async def work(planner: Planner) -> Any:
        start = await planner.initial()
        end = await planner.latest(start, 2)
        (first,) = await planner.plans(start, end)
        await asyncio.to_thread(put, nats_server.url, "b", "later", b"v")
        then = await planner.latest(end, 2)
        (second,) = await planner.plans(end, then)
        return end, first, second

    end, first, second = plan(nats_server.url, "b", work)
    assert (end.stream_seq, end.consumer_seq, end.initial_through) == (20, 4, 20)
    assert (first.last_per_subject, first.filters) == (True, ("$KV.b.>",))
    assert (second.last_per_subject, second.filters, second.start, second.end) == (
        False,
        (),
        20,
        21,
    )


def test_limits_count_rows_on_a_bucket_of_mostly_holes(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=1)
    put_many(nats_server.url, "b", ((f"k{i % 100}", b"v") for i in range(5000)))
    put_many(nats_server.url, "b", ((f"k{i % 50}", b"v") for i in range(5000)))
    put(nats_server.url, "b", "k99", b"v")  # 50 rows around 5,000, 50 around 10,000
    last = 10_001
    live = [*range(4951, 5000), *range(9951, last + 1)]

    found = plan(nats_server.url, "b", lambda planner: ends(planner, 20))
    assert found[-1] == last
    starts = [0, *found[:-1]]
    rows = [sum(1 for s in live if a < s <= b) for a, b in zip(starts, found, strict=True)]
    assert max(rows) <= 20
    assert sum(rows) == 100
    assert len(found) <= 12


def test_a_limit_needs_no_rank_where_nearly_all_sequences_have_a_row(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank takes longer than all the rest, and could not make the micro-batches fewer."""
    ranks: list[int] = []
    ask = counts.count_from

    async def asked(jetstream: JetStream, stream: str, seq: int, filters: Sequence[str]) -> int:
        ranks.append(seq)
        return await ask(jetstream, stream, seq, filters)

    monkeypatch.setattr(counts, "count_from", asked)
    create_bucket(nats_server.url, "b", history=1)
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(1000)))
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(500, 520)))
    assert plan(nats_server.url, "b", lambda planner: ends(planner, 102)) == [
        *range(102, 1020, 102),
        1020,
    ]
    assert not ranks
    # Half of all sequences: now it is worth a question.
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(0, 1000, 2)))
    assert len(plan(nats_server.url, "b", lambda planner: ends(planner, 102))) < 1520 // 102
    assert ranks


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_limits_under_filters(nats_server: NatsServer, limit: int) -> None:
    create_bucket(nats_server.url, "b", history=64)
    put_many(nats_server.url, "b", ((f"k{i % 10}.x", b"v") for i in range(300)))
    matching = [s for s in range(1, 301) if (s - 1) % 10 in (3, 7)]
    options = {"keys": "k3.*,k7.x", "includeHistory": "true"}

    found = plan(nats_server.url, "b", lambda planner: ends(planner, limit), **options)
    starts = [0, *found[:-1]]
    rows = [sum(1 for s in matching if a < s <= b) for a, b in zip(starts, found, strict=True)]
    assert max(rows) <= limit
    assert sum(rows) == len(matching)
    assert found[-1] == matching[-1]


def test_a_filter_that_rarely_matches_does_not_stay_behind(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=64)
    put(nats_server.url, "b", "rare", b"v")

    async def work(planner: Planner) -> list[int]:
        start = await planner.latest(await planner.initial(), None)
        positions = [start.stream_seq]
        for _ in range(8):
            entries = [(f"k{i}", b"v") for i in range(10)]
            await asyncio.to_thread(put_many, nats_server.url, "b", entries)
            start = await planner.latest(start, None)
            positions.append(start.stream_seq)
        return positions

    positions = plan(nats_server.url, "b", work, keys="rare")
    assert positions[0] == 1
    assert positions[-1] > 40  # in the newer half of 81
    assert len(set(positions)) <= 5  # not with every write


def test_available_now_ends_where_it_began_to_read(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(10)))

    async def work(planner: Planner) -> list[int]:
        await planner.prepare_available_now()
        await asyncio.to_thread(put, nats_server.url, "b", "later", b"v")
        return await ends(planner)

    assert plan(nats_server.url, "b", work) == [10]


def test_lag(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(50)))

    async def work(planner: Planner) -> tuple[Offset, Offset | None]:
        return await planner.latest(await planner.initial(), 10), planner.newest()

    end, newest = plan(nats_server.url, "b", work)
    assert newest is not None
    assert newest.consumer_seq - end.consumer_seq == 40


class Asked:
    """The subjects of the JetStream requests that were made since it was put in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.subjects: list[str] = []
        original = JetStream.call

        async def counted(jetstream: JetStream, subject: str, request: Any = None) -> Any:
            self.subjects.append(subject)
            return await original(jetstream, subject, request)

        monkeypatch.setattr(JetStream, "call", counted)


def test_idle_asks_little_and_makes_no_consumer(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_bucket(nats_server.url, "b")
    put(nats_server.url, "b", "a", b"v")
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def whole() -> int:
        nonlocal now
        async with planning(nats_server.url, "b", lambda: now, sleep) as planner:
            start = await planner.latest(await planner.initial(), None)
            asked = Asked(monkeypatch)
            began = now
            while now < began + 60:
                now += 0.01  # Spark's own pause
                assert await planner.latest(start, None) == start
            looks = len(asked.subjects)
            assert set(asked.subjects) == {"STREAM.INFO.KV_b"}
            await asyncio.to_thread(put, nats_server.url, "b", "later", b"v")
            assert await planner.latest(start, None) != start
            return looks

    assert asyncio.run(whole()) < 600
    assert consumers(nats_server.url, "b") == []


def test_many_filters_cost_few_requests_while_others_write(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what matches in the end is found, whichever filter it is."""
    create_bucket(nats_server.url, "b", history=-1)
    put_many(nats_server.url, "b", [("other", b"v")] * 1000)

    async def write(count: int, key: str = "other") -> None:
        await asyncio.to_thread(put_many, nats_server.url, "b", [(key, b"v")] * count)

    async def whole() -> None:
        keys = [f"k{i}" for i in range(40)]
        async with planning(nats_server.url, "b", keys=",".join(keys)) as planner:
            start = await planner.latest(await planner.initial(), None)
            await write(20)
            assert await planner.latest(start, None) == start  # the first look asks for all
            asked = Asked(monkeypatch)
            for count in (3, 30, 3, 30):
                await write(count)
                asked.subjects.clear()
                assert await planner.latest(start, None) == start
                assert len(asked.subjects) <= 11
            for key in keys[::13]:
                await write(20)
                assert await planner.latest(start, None) == start
                await write(1, key)
                await write(20)
                looks = 1
                while (end := await planner.latest(start, None)) == start:
                    looks += 1
                    assert looks <= 5  # eight filters a look
                (split,) = await planner.plans(start, end)
                assert split.end > split.start + 20
                start = end

    asyncio.run(whole())


def test_available_now_asks_for_every_filter(nats_server: NatsServer) -> None:
    """Also after a look from the same place: an answer of "nothing" would end the run."""
    create_bucket(nats_server.url, "b", history=-1)
    put_many(nats_server.url, "b", [("other", b"v")] * 1000)

    async def write(*keys: str) -> None:
        await asyncio.to_thread(put_many, nats_server.url, "b", [(key, b"v") for key in keys])

    async def work(planner: Planner) -> list[int]:
        start = await planner.initial()
        await write(*["other"] * 10)
        assert await planner.latest(start, None) == start
        await write(*["other"] * 10, "k9", *["other"] * 10)
        await planner.prepare_available_now()
        return await ends(planner)

    keys = ",".join(f"k{i}" for i in range(40))
    assert plan(nats_server.url, "b", work, keys=keys, updatesOnly="true") == [1021]


# -- splits ---------------------------------------------------------------------------------------


def splits_of(url: str, bucket: str, cores: int = 2, **options: str) -> list[Any]:
    async def work(planner: Planner) -> list[Any]:
        start = await planner.initial()
        return list(await planner.plans(start, await planner.latest(start, None)))

    return plan(url, bucket, work, cores=cores, **options)


@pytest.mark.parametrize("keys", ["", "a.*"])
def test_splits_of_a_range_that_ends_before_the_stream(nats_server: NatsServer, keys: str) -> None:
    """Ranks count to the stream's end, which is none of the range's business."""
    url = nats_server.url
    create_bucket(url, "b")
    put_many(url, "b", ((f"{'ab'[i % 2]}.{i}", b"v") for i in range(4000)))
    options = {"minPartitions": "4"} | ({"keys": keys} if keys else {})

    async def work(planner: Planner) -> list[Any]:
        start = await planner.initial()
        return list(await planner.plans(start, await planner.latest(start, 400)))

    rows = [split.end - split.start for split in plan(url, "b", work, **options)]
    assert len(rows) == 4
    assert max(rows) <= 1.25 * sum(rows) / 4


@pytest.mark.parametrize("keys", ["", "a.*", "a.*,b.*,c.*,d.*,e.*,f.*"])
def test_splits_are_balanced_by_rows(nats_server: NatsServer, keys: str) -> None:
    """All but one that are left lie in the last twentieth of the stream."""
    create_bucket(nats_server.url, "b")
    names = [f"{'abcdef'[i % 6]}.{i}" for i in range(600)]
    put(nats_server.url, "b", "a.first", b"v")
    put_many(nats_server.url, "b", ((names[i % 3], b"v") for i in range(11_399)))
    put_many(nats_server.url, "b", ((name, b"v") for name in names))
    last = 12_000
    options = {"minPartitions": "4"} | ({"keys": keys} if keys else {})
    splits = splits_of(nats_server.url, "b", **options)
    assert splits[0].start == 0
    assert all(a.end == b.start for a, b in itertools.pairwise(splits))
    wanted = keys.replace("*", "").split(",")
    live = [1] + [
        seq
        for seq, name in zip(range(last - 599, last + 1), names, strict=True)
        if not keys or name.startswith(tuple(wanted))
    ]
    rows = [sum(1 for seq in live if split.start < seq <= split.end) for split in splits]
    assert sum(rows) == len(live)
    assert len(rows) == 4
    assert max(rows) <= 0.25 * len(live) * 1.25


def test_a_small_range_is_one_split_and_asks_nothing(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(1000)))

    async def work(planner: Planner) -> Any:
        start = await planner.initial()
        asked = Asked(monkeypatch)
        splits = await planner.plans(start, await planner.latest(start, None))
        return splits, asked.subjects

    splits, asked = plan(nats_server.url, "b", work, cores=64)
    assert [(split.start, split.end) for split in splits] == [(0, 1000)]
    assert asked == ["STREAM.INFO.KV_b"]


def test_a_large_range_is_cut_for_the_cores(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "BYTES_PER_SPLIT", 1 << 20)
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i}", bytes(100_000)) for i in range(35)))
    sizes = [split.end - split.start for split in splits_of(nats_server.url, "b", cores=64)]
    assert len(sizes) == 3
    assert max(sizes) <= 13
    assert len(splits_of(nats_server.url, "b", cores=2)) == 2
    assert len(splits_of(nats_server.url, "b", cores=1)) == 1


def test_fewer_sequences_than_min_partitions(ten: str) -> None:
    splits = splits_of(ten, "b", minPartitions="50")
    assert [(split.start, split.end) for split in splits] == [(i, i + 1) for i in range(10)]


def test_splits_of_complete_history(ten: str) -> None:
    """What must not have gone away is each split's own beginning."""
    splits = splits_of(ten, "b", minPartitions="2", includeHistory="true")
    assert [split.complete_from for split in splits] == [1, splits[0].end + 1]


def test_initial_values_of_a_bucket_with_history_are_one_split(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b", history=5)
    put_many(nats_server.url, "b", ((f"k{i % 4}", b"v") for i in range(20)))
    (split,) = splits_of(nats_server.url, "b", minPartitions="4", maxRowsPerTrigger="7")
    assert (split.start, split.end, split.last_per_subject) == (0, 20, True)


def test_a_limit_in_bytes(nats_server: NatsServer) -> None:
    """By the mean size of a message: 100 of 1,000 bytes, and some 50 of the store's own."""
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i}", bytes(1000)) for i in range(100)))

    async def sizes(planner: Planner, rows: int | None, nbytes: int) -> list[int]:
        found, start = [], await planner.initial()
        while (end := await planner.latest(start, rows, nbytes)) != start:
            found.append(end.stream_seq - start.stream_seq)
            start = end
        return found

    def limited(rows: int | None, nbytes: int) -> list[int]:
        return plan(nats_server.url, "b", lambda planner: sizes(planner, rows, nbytes))

    in_bytes = limited(None, 21_000)
    assert sum(in_bytes) == 100
    assert 17 <= in_bytes[0] <= 20
    assert max(in_bytes) <= 20
    assert max(limited(5, 21_000)) == 5  # both hold
    assert max(limited(50, 21_000)) <= 20
    assert limited(None, 1) == [1] * 100  # at least one row


# -- what an offset reports -----------------------------------------------------------------------


def last_of(url: str, bucket: str, limit: int | None = None, **options: str) -> Offset:
    async def work(planner: Planner) -> Offset:
        start = await planner.initial()
        while (end := await planner.latest(start, limit)) != start:
            start = end
        return start

    return plan(url, bucket, work, **options)


@pytest.mark.parametrize("limit", [None, 7])
def test_consumer_seq_counts_no_holes_among_initial_values(
    nats_server: NatsServer, limit: int | None
) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i % 20}", b"v") for i in range(1000)))
    assert last_of(nats_server.url, "b", limit).consumer_seq == 20


def test_consumer_seq_counts_what_came_later_though_it_was_superseded(
    nats_server: NatsServer,
) -> None:
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i % 20}", b"v") for i in range(100)))

    async def work(planner: Planner) -> Offset:
        start = await planner.latest(await planner.initial(), None)
        entries = [(f"k{i % 2}", b"v") for i in range(50)]
        await asyncio.to_thread(put_many, nats_server.url, "b", entries)
        return await planner.latest(start, None)

    assert plan(nats_server.url, "b", work).consumer_seq == 70


@pytest.mark.parametrize(("keys", "count"), [("", 6), ("a.*", 3), ("a.*,b.1", 4), ("c", 0)])
def test_consumer_seq_of_last_values_under_filters(
    nats_server: NatsServer, keys: str, count: int
) -> None:
    create_bucket(nats_server.url, "b", history=5)
    names = [f"{one}.{i}" for one in "ab" for i in range(3)]
    put_many(nats_server.url, "b", ((name, b"v") for name in names * 4))
    end = last_of(nats_server.url, "b", **({"keys": keys} if keys else {}))
    assert (end.stream_seq, end.consumer_seq) == (24, count)


# -- refusals and losses --------------------------------------------------------------------------


def test_no_such_bucket(shared_server: NatsServer) -> None:
    with pytest.raises(BucketNotFoundError, match=r"bucket 'none'.*stream 'KV_none'"):
        plan(shared_server.url, "none", Planner.initial)


def test_a_work_queue_is_refused(shared_server: NatsServer) -> None:
    create_bucket(shared_server.url, "work", retention="workqueue", allow_direct=False)
    with pytest.raises(UnsupportedStreamError, match="'workqueue'"):
        plan(shared_server.url, "work", Planner.initial)


def read_all(url: str, **options: str) -> Offset:
    async def work(planner: Planner) -> Offset:
        return await planner.latest(await planner.initial(), None)

    return plan(url, "b", work, **options)


def go_on(url: str, start: Offset, **options: str) -> Any:
    async def work(planner: Planner) -> Any:
        end = await planner.latest(start, None)
        return end, await planner.plans(start, end)

    return plan(url, "b", work, **options)


@pytest.fixture
def ten(nats_server: NatsServer) -> str:
    """The address of a server whose bucket ``b`` has ten entries, one a key."""
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(10)))
    return nats_server.url


ACCEPT = {"failOnDataLoss": "false"}


def test_replaced_stream(ten: str) -> None:
    start = read_all(ten)
    delete_bucket(ten, "b")
    create_bucket(ten, "b")
    put(ten, "b", "new", b"v")
    with pytest.raises(DataLossError, match=r"deleted and made again.*after revision 10.*failOnD"):
        go_on(ten, start)
    end, (split,) = go_on(ten, start, **ACCEPT)
    assert (end.epoch, end.origin, end.stream_seq) == (1, 0, 1)
    assert end.created != start.created
    assert (split.start, split.end) == (0, 1)
    assert go_on(ten, end) == (end, [])  # the new epoch is nothing to fail for


@pytest.mark.parametrize("grown", [0, 2, 3, 20])
def test_set_back_stream(ten: str, grown: int) -> None:
    """As after a restore of an older backup: the same ``created``, fewer sequences."""
    start = read_all(ten)
    put_many(ten, "b", ((f"m{i}", b"v") for i in range(grown)))
    # What the query had read beyond 10 is gone, other messages have these sequences now.
    read_until = "2100-01-01T00:00:00Z" if grown < 3 else start.time
    lost = replace(start, stream_seq=13, time=read_until)
    if grown == 0:
        with pytest.raises(DataLossError, match="was set back: it now ends at 10"):
            go_on(ten, lost)
    if grown >= 3:
        with pytest.raises(DataLossError, match="another message at 13"):
            go_on(ten, lost)
    end, splits = go_on(ten, lost, **ACCEPT)
    assert end.epoch == 1
    if grown >= 3:  # from the first message that is later than what was read
        assert (end.origin, end.stream_seq) == (10, 10 + grown)
        assert [(split.start, split.end) for split in splits] == [(10, 10 + grown)]
    else:
        assert (end.origin, splits) == (10 + grown, [])


def test_set_back_to_before_anything_that_was_read(ten: str) -> None:
    start = replace(read_all(ten), stream_seq=12, time="2001-01-01T00:00:00Z")
    end, (split,) = go_on(ten, start, **ACCEPT)
    assert (end.epoch, end.origin, split.start, split.end) == (1, 0, 0, 10)


@pytest.mark.parametrize("how", ["terminate", "kill"])
@pytest.mark.parametrize("what", ["the last message deleted", "all purged"])
def test_a_healthy_stream_is_not_taken_for_set_back(
    nats_server: NatsServer, how: str, what: str
) -> None:
    """A killed server does not know the time of a last message that was deleted."""
    create_bucket(nats_server.url, "b", deny_delete=False)
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(10)))
    start = read_all(nats_server.url)
    if what == "all purged":
        api(nats_server.url, "STREAM.PURGE.KV_b")
    else:
        api(nats_server.url, "STREAM.MSG.DELETE.KV_b", {"seq": 10})
    getattr(nats_server, how)()
    nats_server.start()
    assert stream_state(nats_server.url, "b")["last_seq"] == 10
    assert go_on(nats_server.url, start) == (start, [])
    put(nats_server.url, "b", "later", b"v")
    end, _ = go_on(nats_server.url, start)
    assert (end.epoch, end.stream_seq) == (0, 11)


def test_a_start_beyond_the_end_waits(ten: str) -> None:
    start = read_all(ten, startSequence="15")
    assert (start.stream_seq, start.time) == (14, None)
    assert go_on(ten, start, startSequence="15") == (start, [])
    put_many(ten, "b", ((f"m{i}", b"v") for i in range(6)))
    end, (split,) = go_on(ten, start, startSequence="15")
    assert (split.start, split.end, end.stream_seq) == (14, 16, 16)


def test_aged_out_history_is_loss_only_where_history_was_asked_for(ten: str) -> None:
    start = read_all(ten)
    put_many(ten, "b", ((f"k{i % 10}", b"v") for i in range(100)))
    assert stream_state(ten, "b")["first_seq"] == 101
    end, _ = go_on(ten, start)
    assert end.stream_seq == 110
    history = {"includeHistory": "true"}
    with pytest.raises(DataLossError, match=r"begins at 101.*revisions 11 to 100"):
        go_on(ten, start, **history)
    end, (split,) = go_on(ten, start, **history, **ACCEPT)
    assert (end.epoch, split.start, split.end, split.complete_from) == (0, 10, 110, 101)


def test_a_logged_range_of_a_replaced_stream(ten: str) -> None:
    """The first batch was logged, not finished; the stream was made anew before the restart."""
    end = read_all(ten)
    delete_bucket(ten, "b")
    create_bucket(ten, "b")
    put(ten, "b", "new", b"v")

    async def restart(planner: Planner) -> Any:
        return await planner.plans(await planner.initial(), end)

    with pytest.raises(DataLossError, match="planned but not finished"):
        plan(ten, "b", restart)
    assert plan(ten, "b", restart, **ACCEPT) == []


def test_a_logged_range_of_a_stream_that_was_set_back(ten: str) -> None:
    """What is left of the planned range is read; what is gone is said to be."""
    logged = replace(read_all(ten), stream_seq=14, time="2100-01-01T00:00:00Z")

    async def restart(planner: Planner) -> Any:
        start = replace(await planner.initial(), stream_seq=6)
        splits = await planner.plans(start, logged)
        return splits, await planner.latest(logged, None)

    with pytest.raises(DataLossError, match="what came after 10 is gone"):
        plan(ten, "b", restart)
    (split,), then = plan(ten, "b", restart, **ACCEPT)
    assert (split.start, split.end) == (6, 10)
    assert (then.epoch, then.origin) == (1, 10)


def test_set_back_to_an_empty_stream(ten: str) -> None:
    """A stream that never had a message has no sequence 0 to go on from, nor -1."""
    start = read_all(ten)
    delete_bucket(ten, "b")
    created = create_bucket(ten, "b")["created"]
    end, splits = go_on(ten, replace(start, created=created), **ACCEPT)
    assert (end.epoch, end.origin, end.stream_seq, splits) == (1, 0, 0, [])


def test_aged_out_under_a_filter_is_only_a_warning(
    ten: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether any of the query's own keys lost a revision, nobody knows any more."""
    options = {"includeHistory": "true", "keys": "k0"}
    start = read_all(ten, **options)
    put_many(ten, "b", ((f"k{i % 10}", b"v") for i in range(100)))
    end, _ = go_on(ten, start, **options)
    assert end.epoch == 0
    assert "if there were any of keys=k0" in caplog.text


@pytest.mark.parametrize("limit", [1, 5, 20])
def test_a_limit_under_steady_writes_moves_on(ten: str, limit: int) -> None:
    """Ranks of different moments contradict each other; no batch is empty for that."""
    acknowledged = 10
    enough = threading.Event()

    def write() -> None:
        nonlocal acknowledged
        while not enough.is_set():
            revisions = put_many(ten, "b", ((f"k{i % 10}", b"w") for i in range(200)))
            acknowledged = revisions[-1]

    async def work(planner: Planner) -> None:
        start = await planner.initial()
        writing = asyncio.create_task(asyncio.to_thread(write))
        try:
            planned = 0
            while planned < 20 or acknowledged == 10:
                planned += 1
                known = acknowledged
                end = await planner.latest(start, limit)
                assert end.stream_seq > start.stream_seq or known <= start.stream_seq
                start = end
        finally:
            enough.set()
            await writing

    plan(ten, "b", work)


def test_a_logged_first_batch_is_read_from_its_own_origin(ten: str) -> None:
    """Updates only: at the restart the stream has grown past the logged end."""

    async def first(planner: Planner) -> Offset:
        start = await planner.initial()
        await asyncio.to_thread(put, ten, "b", "k10", b"v")
        return await planner.latest(start, None)

    logged = plan(ten, "b", first, updatesOnly="true")
    assert (logged.origin, logged.stream_seq) == (10, 11)
    put_many(ten, "b", [("k11", b"v"), ("k12", b"v")])

    async def restart(planner: Planner) -> Any:
        return await planner.plans(await planner.initial(), logged)

    (split,) = plan(ten, "b", restart, updatesOnly="true")
    assert (split.start, split.end) == (10, 11)


def test_another_bucket_or_other_keys(ten: str) -> None:
    start = read_all(ten)
    with pytest.raises(OffsetError, match=r"of stream KV_other.*option 'bucket'"):
        go_on(ten, replace(start, stream="KV_other"))
    with pytest.raises(OffsetError, match=r"keys=\(all\), the query has keys=k1"):
        go_on(ten, start, keys="k1")


def test_a_mirror_keeps_the_subjects_of_its_origin(ten: str) -> None:
    api(ten, "STREAM.CREATE.KV_copy", {"name": "KV_copy", "mirror": {"name": "KV_b"}})
    for _ in range(500):
        if stream_state(ten, "copy")["last_seq"] == 10:
            break

    async def work(planner: Planner) -> Any:
        start = await planner.initial()
        return await planner.plans(start, await planner.latest(start, None))

    (split,) = plan(ten, "copy", work)
    assert (split.prefix, split.filters) == ("$KV.b.", ("$KV.b.>",))


def test_many_keys_keep_the_limit(nats_server: NatsServer) -> None:
    """A look asks for eight of them, and one that saw others' writes only proves nothing."""
    url = nats_server.url
    create_bucket(url, "b", history=64)
    put_many(url, "b", [("other", b"")] * 10)
    options = {"keys": ",".join(f"k{i:02}" for i in range(20)), "includeHistory": "true"}

    async def work(planner: Planner) -> tuple[list[int], Offset]:
        start = await planner.initial()
        start = await planner.latest(start, 5)
        for _ in range(3):  # what follows the first look, which asks for all
            await asyncio.to_thread(put, url, "b", "other", b"")
            start = await planner.latest(start, 5)
        rows = await asyncio.to_thread(
            put_many, url, "b", [("k15", b"%d" % i) for i in range(60)] + [("other", b"")]
        )
        sizes = []
        for _ in range(100):
            end = await planner.latest(start, 5)
            sizes.append(sum(start.stream_seq < seq <= end.stream_seq for seq in rows[:60]))
            start = end
        return sizes, start

    sizes, end = plan(url, "b", work, **options)
    assert sum(sizes) == 60
    assert max(sizes) <= 5
    assert end.stream_seq >= 73


def test_a_least_sequence_that_a_new_stream_does_not_have(ten: str) -> None:
    """The option is for the first start; who restarts with it is told so."""

    async def work(planner: Planner) -> Offset:
        return await planner.initial()

    with pytest.raises(MinLastSequenceError, match="'minLastRevision' is for a query's first"):
        plan(ten, "b", work, minLastRevision="11", requestTimeout="0.3")
