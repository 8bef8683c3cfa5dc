"""Counting rows: what is asked of a server, what is remembered, and which way the errors lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from buckets import create_bucket, put_many

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConsumerLimitError
from nats_stream_source.jetstream.api import JetStream, Replica, StreamInfo
from nats_stream_source.jetstream.connection import Connection, ConnectionSettings
from nats_stream_source.source import counts as counts_module
from nats_stream_source.source.counts import Counts

pytestmark = pytest.mark.servers

T = TypeVar("T")

# 100 keys, each written ten times; then the first half of them once more.
LAST = 1050
LIVE = [*range(951, 1001), *range(1001, 1051)]


def count(
    server: NatsServer, work: Callable[[Counts, JetStream, StreamInfo], Coroutine[Any, Any, T]]
) -> T:
    async def whole() -> T:
        connection = await Connection.open(ConnectionSettings(servers=(server.url,)))
        try:
            jetstream = JetStream(connection)
            info = await jetstream.stream_info("KV_b")
            return await work(Counts(lambda: 0.0), jetstream, info)
        finally:
            await connection.close()

    return asyncio.run(whole())


@pytest.fixture
def bucket(nats_server: NatsServer) -> NatsServer:
    create_bucket(nats_server.url, "b")
    keys = [f"k{i % 100}" for i in range(1000)] + [f"k{i}" for i in range(50)]
    put_many(nats_server.url, "b", ((key, b"v") for key in keys))
    return nats_server


def after(seq: int) -> int:
    return sum(1 for live in LIVE if live > seq)


def test_ranks(bucket: NatsServer) -> None:
    async def work(counts: Counts, jetstream: JetStream, info: StreamInfo) -> Any:
        counts.begin(jetstream, info, ())
        counts.allow(1)
        return await counts.total(970), await counts.each_after([980, 1049])

    assert count(bucket, work) == (after(970), [after(980), 1])


def test_all_messages_need_no_question(bucket: NatsServer) -> None:
    async def work(counts: Counts, jetstream: JetStream, info: StreamInfo) -> Any:
        counts.begin(jetstream, info, ())
        known = counts.known(0, 0), counts.known(info.first_seq, 0)
        counts.begin(jetstream, info, ("$KV.b.k1",))
        return known, counts.known(0, 0)

    assert count(bucket, work) == ((100, None), None)


def test_what_was_answered_is_remembered_while_little_is_written(bucket: NatsServer) -> None:
    async def work(counts: Counts, jetstream: JetStream, info: StreamInfo) -> Any:
        counts.begin(jetstream, info, ())
        counts.allow(1)
        await counts.after(980)
        counts.begin(jetstream, replace(info, last_seq=info.last_seq + 3), ())
        places = [(980, 3), (982, 3), (980, 2), (984, 3), (979, 3)]
        return [counts.known(seq, tolerance) for seq, tolerance in places]

    # What was written since may all match, and what lies before 982 is counted again.
    assert count(bucket, work) == [after(980) + 3, after(980) + 3, None, None, None]


def test_what_is_written_meanwhile_counts_as_rows_before_not_behind(bucket: NatsServer) -> None:
    """So that the difference of two counts is an upper bound."""

    async def work(counts: Counts, jetstream: JetStream, info: StreamInfo) -> Any:
        counts.begin(jetstream, info, ())
        counts.allow(1)
        total = await counts.total(960)
        entries = [(f"k{i}", b"again") for i in range(60, 80)]
        await asyncio.to_thread(put_many, bucket.url, "b", entries)
        return total, await counts.after(970), await counts.total(960)

    total, behind, again = count(bucket, work)
    assert total == after(960) == again
    # k60 to k79 were 961 to 980: ten of them lay behind 970, and the new ones do not count.
    assert behind == after(970) - 10
    assert total - behind >= after(960) - after(970)


def test_sequences_without_a_row(bucket: NatsServer) -> None:
    """Known from the stream's own numbers, or from a rank and what went away since."""

    async def work(counts: Counts, jetstream: JetStream, info: StreamInfo) -> Any:
        counts.begin(jetstream, info, ())
        found = [counts.gaps(950)]
        entries = [(f"k{i}", b"again") for i in range(60, 70)]  # they were 961 to 970
        await asyncio.to_thread(put_many, bucket.url, "b", entries)
        counts.begin(jetstream, await jetstream.stream_info(info.name), ())
        counts.allow(1)
        found += [counts.gaps(950), counts.gaps(980)]
        await counts.total(980)
        found += [counts.gaps(979), counts.gaps(980), counts.gaps(990)]
        await asyncio.to_thread(put_many, bucket.url, "b", [("k0", b"again"), ("new", b"v")])
        counts.begin(jetstream, await jetstream.stream_info(info.name), ())
        return [*found, counts.gaps(980)]

    assert count(bucket, work) == [0, 10, 10, 10, 0, 0, 1]


def test_sequences_without_a_row_under_a_filter(bucket: NatsServer) -> None:
    async def work(counts: Counts, jetstream: JetStream, info: StreamInfo) -> Any:
        filters = ("$KV.b.k1", "$KV.b.k2")  # 1002 and 1003
        counts.begin(jetstream, info, filters)
        counts.allow(1)
        found = [counts.gaps(1000)]
        await counts.total(1000)
        found += [counts.gaps(999), counts.gaps(1000)]
        # Two entries, of which one takes another's place, and which may not match.
        await asyncio.to_thread(put_many, bucket.url, "b", [("k3", b"again"), ("new", b"v")])
        counts.begin(jetstream, await jetstream.stream_info(info.name), filters)
        return [*found, counts.gaps(1000)]

    assert count(bucket, work) == [None, None, 48, 51]


def with_replica(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Let the server's answers have a follower; what is returned sets its lag and ``active``."""
    parse, now = StreamInfo.parse, Replica("b", 0, 1)

    def set_to(lag: int, active: int = 1) -> None:
        nonlocal now
        now = Replica("b", lag, active)

    def replicated(_: type[StreamInfo], answer: dict[str, Any]) -> StreamInfo:
        return replace(parse(answer), replicas=(now,))

    monkeypatch.setattr(StreamInfo, "parse", classmethod(replicated))
    return set_to


def test_while_a_replica_lags_no_count_is_an_upper_bound(
    bucket: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it kept; also one that was, is not any more. As an estimate it will do."""
    replica = with_replica(monkeypatch)

    async def work(counts: Counts, jetstream: JetStream, info: StreamInfo) -> Any:
        counts.begin(jetstream, info, ())
        counts.allow(1)
        found = [await counts.total(970), counts.known(970, 0)]
        replica(1)
        found += [await counts.total(970), counts.known(970, 0)]
        return [*found, await counts.after(970), await counts.about(970)]

    rows = after(970)
    assert count(bucket, work) == [rows, rows, None, None, rows, rows]


@pytest.mark.parametrize("active", [0, 40 * 10**9], ids=["never", "not now"])
def test_a_replica_that_is_not_heard_of_lags_for_half_a_minute(
    bucket: NatsServer, monkeypatch: pytest.MonkeyPatch, active: int
) -> None:
    replica = with_replica(monkeypatch)

    async def work(_: Counts, jetstream: JetStream, info: StreamInfo) -> Any:
        now = 0.0
        counts = Counts(lambda: now)
        found = []
        for at, heard in (
            (0.0, active),
            (29.0, active),
            (31.0, active),
            (32.0, 1),  # it is back
            (33.0, active),
            (64.0, active),
        ):
            now = at
            replica(5, heard)
            counts.begin(jetstream, await jetstream.stream_info(info.name), ())
            counts.allow(1, 1)
            found.append(await counts.total(970))
        return found

    rows = after(970)
    assert count(bucket, work) == [None, None, rows, None, None, rows]


def test_a_stream_made_anew_or_set_back_has_other_counts(bucket: NatsServer) -> None:
    async def work(counts: Counts, jetstream: JetStream, info: StreamInfo) -> Any:
        found = []
        for other in (
            replace(info, created="2020-01-01T00:00:00Z"),
            replace(info, last_seq=info.last_seq - 1),
        ):
            counts.begin(jetstream, info, ())
            counts.allow(1, 1)
            await counts.total(970)
            found.append(counts.known(970, 0))
            counts.begin(jetstream, other, ())
            counts.begin(jetstream, replace(info, created=other.created), ())
            found.append(counts.known(970, 0))
        return found

    assert count(bucket, work) == [after(970), None, after(970), None]


def test_no_question_that_would_take_too_long(
    bucket: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank takes a second of the test's clock."""
    now = 0.0
    asked = 0
    original = counts_module.count_from

    async def slow(*args: Any) -> int:
        nonlocal now, asked
        now += 1
        asked += 1
        return await original(*args)

    monkeypatch.setattr(counts_module, "count_from", slow)

    async def work(_: Counts, jetstream: JetStream, info: StreamInfo) -> Any:
        counts = Counts(lambda: now)
        counts.begin(jetstream, info, ())
        counts.allow(0.5)
        first = await counts.after(980)  # it was not known how long it takes
        found = [first, await counts.after(981), await counts.total(0)]
        counts.begin(jetstream, info, ())
        counts.allow(0.5, 1)
        found += [await counts.after(982), await counts.after(983)]
        for _ in range(100):  # plannings later it may be another matter
            counts.begin(jetstream, info, ())
        counts.allow(0.5)
        return [*found, await counts.after(984)]

    expected = [after(980), None, None, after(982), None, after(984)]
    assert count(bucket, work) == expected
    assert asked == 3


def test_a_count_that_is_refused_is_not_an_earlier_one(
    bucket: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier one lacks what was written since, and a limit would be exceeded by as much."""
    original = counts_module.count_from
    answers = 1

    async def limited(*args: Any) -> int:
        nonlocal answers
        answers -= 1
        if answers < 0:
            raise ConsumerLimitError("no more")
        return await original(*args)

    monkeypatch.setattr(counts_module, "count_from", limited)

    async def work(_: Counts, jetstream: JetStream, info: StreamInfo) -> Any:
        counts = Counts(lambda: 0.0)
        counts.begin(jetstream, info, ())
        counts.allow(1.0, 9)
        return [
            await counts.total(980),
            await counts.total(980),
            await counts.about(980),
            await counts.after(980),
        ]

    assert count(bucket, work) == [after(980), None, None, None]
    assert answers == -3
