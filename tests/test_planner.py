"""The planner against a real server, without Spark."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
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
    OffsetError,
    UnsupportedStreamError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.link import Link
from nats_stream_source.options import kv_options
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.planner import Planner

T = TypeVar("T")


@asynccontextmanager
async def planning(
    url: str, bucket: str, clock: Callable[[], float] | None = None, **options: str
) -> AsyncIterator[Planner]:
    parsed = kv_options({"servers": url, "bucket": bucket, **options})
    link = Link(parsed.connection)
    # A clock that jumps a second with every look never rests.
    ticks = iter(range(10**9))
    try:
        yield Planner(parsed, link, clock or (lambda: float(next(ticks))))
    finally:
        await link.drop()


def plan(
    url: str, bucket: str, work: Callable[[Planner], Coroutine[Any, Any, T]], **options: str
) -> T:
    async def whole() -> T:
        async with planning(url, bucket, **options) as planner:
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


def test_idle_asks_little_and_makes_no_consumer(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_bucket(nats_server.url, "b")
    put(nats_server.url, "b", "a", b"v")
    calls: list[str] = []
    original = JetStream.call

    async def counted(self: JetStream, subject: str, request: Any = None) -> Any:
        calls.append(subject)
        return await original(self, subject, request)

    now = 0.0

    async def whole() -> None:
        nonlocal now
        async with planning(nats_server.url, "b", clock=lambda: now) as planner:
            start = await planner.latest(await planner.initial(), None)
            monkeypatch.setattr(JetStream, "call", counted)
            for _ in range(100):  # a second of Spark's polling, every 10 ms
                now += 0.01
                assert await planner.latest(start, None) == start

    asyncio.run(whole())
    assert set(calls) == {"STREAM.INFO.KV_b"}
    assert len(calls) <= 51
    assert consumers(nats_server.url, "b") == []


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

    def write() -> None:
        nonlocal acknowledged
        for _ in range(15):
            revisions = put_many(ten, "b", ((f"k{i % 10}", b"w") for i in range(200)))
            acknowledged = revisions[-1]

    async def work(planner: Planner) -> int:
        start = await planner.initial()
        writing = asyncio.create_task(asyncio.to_thread(write))
        batches = 0
        while not writing.done():
            known = acknowledged
            end = await planner.latest(start, limit)
            assert end.stream_seq > start.stream_seq or known <= start.stream_seq
            start = end
            batches += 1
        await writing
        return batches

    assert plan(ten, "b", work) >= 3


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
