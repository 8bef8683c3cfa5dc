"""Counting rows: what is asked of a server, what is remembered, and which way the errors lie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConsumerLimitError
from nats_stream_source.jetstream.api import JetStream, Replica, StreamInfo
from nats_stream_source.spark.planning import row_counter as counts_module
from nats_stream_source.spark.planning.row_counter import RowCounter
from tests.support.nats.buckets import create_bucket, put_many

pytestmark = pytest.mark.servers

# 100 keys, each written ten times; then the first half of them once more.
LAST = 1050
LIVE = [*range(951, 1001), *range(1001, 1051)]


@asynccontextmanager
async def counting(server: NatsServer) -> AsyncIterator[tuple[RowCounter, JetStream, StreamInfo]]:
    connection = await Connection.open(ConnectionSettings(servers=(server.url,)))
    try:
        jetstream = JetStream(connection)
        info = await jetstream.stream_info("KV_b")
        yield RowCounter(lambda: 0.0), jetstream, info
    finally:
        await connection.close()


@pytest.fixture
def bucket(nats_server: NatsServer) -> NatsServer:
    create_bucket(nats_server.url, "b")
    keys = [f"k{i % 100}" for i in range(1000)] + [f"k{i}" for i in range(50)]
    put_many(nats_server.url, "b", ((key, b"v") for key in keys))
    return nats_server


def after(seq: int) -> int:
    return sum(1 for live in LIVE if live > seq)


async def test_ranks(bucket: NatsServer) -> None:
    async with counting(bucket) as (counts, jetstream, info):
        counts.start_planning(jetstream, info, ())
        counts.set_budget(1)
        assert (await counts.upper_bound(970), await counts.lower_bounds([980, 1049])) == (
            after(970),
            [after(980), 1],
        )


async def test_all_messages_need_no_question(bucket: NatsServer) -> None:
    async with counting(bucket) as (counts, jetstream, info):
        counts.start_planning(jetstream, info, ())
        known = counts.known_rows(0, 0), counts.known_rows(info.first_seq, 0)
        counts.start_planning(jetstream, info, ("$KV.b.k1",))
        assert (known, counts.known_rows(0, 0)) == ((100, None), None)


async def test_what_was_answered_is_remembered_while_little_is_written(bucket: NatsServer) -> None:
    # What was written since may all match, and what lies before 982 is counted again.
    async with counting(bucket) as (counts, jetstream, info):
        counts.start_planning(jetstream, info, ())
        counts.set_budget(1)
        await counts.lower_bound(980)
        counts.start_planning(jetstream, replace(info, last_seq=info.last_seq + 3), ())
        places = [(980, 3), (982, 3), (980, 2), (984, 3), (979, 3)]
        assert [counts.known_rows(seq, tolerance) for seq, tolerance in places] == [
            after(980) + 3,
            after(980) + 3,
            None,
            None,
            None,
        ]


async def test_what_is_written_meanwhile_counts_as_rows_before_not_behind(
    bucket: NatsServer,
) -> None:
    """So that the difference of two counts is an upper bound."""
    async with counting(bucket) as (counts, jetstream, info):
        counts.start_planning(jetstream, info, ())
        counts.set_budget(1)
        total = await counts.upper_bound(960)
        entries = [(f"k{i}", b"again") for i in range(60, 80)]
        await asyncio.to_thread(put_many, bucket.url, "b", entries)
        behind, again = await counts.lower_bound(970), await counts.upper_bound(960)
    assert total == after(960) == again
    # k60 to k79 were 961 to 980: ten of them lay behind 970, and the new ones do not count.
    assert behind == after(970) - 10
    assert total - behind >= after(960) - after(970)


async def test_sequences_without_a_row(bucket: NatsServer) -> None:
    """Known from the stream's own numbers, or from a rank and what went away since."""
    async with counting(bucket) as (counts, jetstream, info):
        counts.start_planning(jetstream, info, ())
        found = [counts.missing_sequences(950)]
        entries = [(f"k{i}", b"again") for i in range(60, 70)]  # they were 961 to 970
        await asyncio.to_thread(put_many, bucket.url, "b", entries)
        counts.start_planning(jetstream, await jetstream.stream_info(info.name), ())
        counts.set_budget(1)
        found += [counts.missing_sequences(950), counts.missing_sequences(980)]
        await counts.upper_bound(980)
        found += [
            counts.missing_sequences(979),
            counts.missing_sequences(980),
            counts.missing_sequences(990),
        ]
        await asyncio.to_thread(put_many, bucket.url, "b", [("k0", b"again"), ("new", b"v")])
        counts.start_planning(jetstream, await jetstream.stream_info(info.name), ())
        assert [*found, counts.missing_sequences(980)] == [0, 10, 10, 10, 0, 0, 1]


async def test_sequences_without_a_row_under_a_filter(bucket: NatsServer) -> None:
    async with counting(bucket) as (counts, jetstream, info):
        filters = ("$KV.b.k1", "$KV.b.k2")  # 1002 and 1003
        counts.start_planning(jetstream, info, filters)
        counts.set_budget(1)
        found = [counts.missing_sequences(1000)]
        await counts.upper_bound(1000)
        found += [counts.missing_sequences(999), counts.missing_sequences(1000)]
        # Two entries, of which one takes another's place, and which may not match.
        await asyncio.to_thread(put_many, bucket.url, "b", [("k3", b"again"), ("new", b"v")])
        counts.start_planning(jetstream, await jetstream.stream_info(info.name), filters)
        assert [*found, counts.missing_sequences(1000)] == [None, None, 48, 51]


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


async def test_while_a_replica_lags_no_count_is_an_upper_bound(
    bucket: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it kept; also one that was, is not any more. As an estimate it will do."""
    replica = with_replica(monkeypatch)

    rows = after(970)
    async with counting(bucket) as (counts, jetstream, info):
        counts.start_planning(jetstream, info, ())
        counts.set_budget(1)
        found = [await counts.upper_bound(970), counts.known_rows(970, 0)]
        replica(1)
        found += [await counts.upper_bound(970), counts.known_rows(970, 0)]
        assert [*found, await counts.lower_bound(970), await counts.estimate(970)] == [
            rows,
            rows,
            None,
            None,
            rows,
            rows,
        ]


@pytest.mark.parametrize("active", [0, 40 * 10**9], ids=["never", "not now"])
async def test_a_replica_that_is_not_heard_of_lags_for_half_a_minute(
    bucket: NatsServer, monkeypatch: pytest.MonkeyPatch, active: int
) -> None:
    replica = with_replica(monkeypatch)

    rows = after(970)
    async with counting(bucket) as (_, jetstream, info):
        now = 0.0
        counts = RowCounter(lambda: now)
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
            counts.start_planning(jetstream, await jetstream.stream_info(info.name), ())
            counts.set_budget(1, 1)
            found.append(await counts.upper_bound(970))
        assert found == [None, None, rows, None, None, rows]


async def test_a_stream_made_anew_or_set_back_has_other_counts(bucket: NatsServer) -> None:
    async with counting(bucket) as (counts, jetstream, info):
        found = []
        for other in (
            replace(info, created="2020-01-01T00:00:00Z"),
            replace(info, last_seq=info.last_seq - 1),
        ):
            counts.start_planning(jetstream, info, ())
            counts.set_budget(1, 1)
            await counts.upper_bound(970)
            found.append(counts.known_rows(970, 0))
            counts.start_planning(jetstream, other, ())
            counts.start_planning(jetstream, replace(info, created=other.created), ())
            found.append(counts.known_rows(970, 0))
        assert found == [after(970), None, after(970), None]


async def test_no_question_that_would_take_too_long(
    bucket: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank takes a second of the test's clock."""
    now = 0.0
    asked = 0
    original = counts_module.count_messages

    async def slow(*args: Any) -> int:
        nonlocal now, asked
        now += 1
        asked += 1
        return await original(*args)

    monkeypatch.setattr(counts_module, "count_messages", slow)

    expected = [after(980), None, None, after(982), None, after(984)]
    async with counting(bucket) as (_, jetstream, info):
        counts = RowCounter(lambda: now)
        counts.start_planning(jetstream, info, ())
        counts.set_budget(0.5)
        first = await counts.lower_bound(980)  # it was not known how long it takes
        found = [first, await counts.lower_bound(981), await counts.upper_bound(0)]
        counts.start_planning(jetstream, info, ())
        counts.set_budget(0.5, 1)
        found += [await counts.lower_bound(982), await counts.lower_bound(983)]
        for _ in range(100):  # plannings later it may be another matter
            counts.start_planning(jetstream, info, ())
        counts.set_budget(0.5)
        assert [*found, await counts.lower_bound(984)] == expected
    assert asked == 3


async def test_a_count_that_is_refused_is_not_an_earlier_one(
    bucket: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier one lacks what was written since, and a limit would be exceeded by as much."""
    original = counts_module.count_messages
    answers = 1

    async def limited(*args: Any) -> int:
        nonlocal answers
        answers -= 1
        if answers < 0:
            raise ConsumerLimitError("no more")
        return await original(*args)

    monkeypatch.setattr(counts_module, "count_messages", limited)

    async with counting(bucket) as (_, jetstream, info):
        counts = RowCounter(lambda: 0.0)
        counts.start_planning(jetstream, info, ())
        counts.set_budget(1.0, 9)
        assert [
            await counts.upper_bound(980),
            await counts.upper_bound(980),
            await counts.estimate(980),
            await counts.lower_bound(980),
        ] == [after(980), None, None, None]
    assert answers == -3
