"""Replicas and mirrors that lag, for readers of many messages (ADR-53, "Note about testing").

A follower lags because the route between it and the leader is held, a mirror because the leaf
node's line to its origin is: both still serve their consumers with what they have. A reader whose
consumer is there must wait or fail; it must not take what is there for all there is.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import nats.errors
import pytest

from nats_stream_source.errors import MinLastSequenceError, NatsSourceError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.bucket import Bucket
from nats_stream_source.jetstream.kv.watch import Watch, WatchOptions
from nats_stream_source.jetstream.ordered import reader
from nats_stream_source.jetstream.ordered.consumer import EphemeralConsumer
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.reusable_connection import ReusableConnection, SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.wire.consumer.cursor import Rebuild
from tests.support.nats.buckets import bucket_info, bucket_state, consumers, create_bucket, put_many
from tests.support.nats.cluster import Cluster, Lagging, lagging
from tests.support.nats.topology import HubAndLeaf, hub_and_leaf, make_mirror
from tests.support.wait import wait_until

pytestmark = [pytest.mark.servers, pytest.mark.cluster(lines=True)]

OLD, ALL = 10, 20
"""What the one that lags has, and what there is."""

_DEADLINE = 60.0
_MOST_PLACEMENTS = 60  # all on servers that do not lag: once in 10 billion runs

_MOST_ELECTIONS = 10

_serial = itertools.count()

Read = Callable[[SharedConnection], Awaitable[list[int]]]
"""A read; the sequences of what it found."""


def new_bucket(cluster: Cluster) -> str:
    name = f"lag{next(_serial)}"
    create_bucket(cluster.url, name, history=5, num_replicas=3)
    cluster.wait_ready(f"KV_{name}")
    put_entries(cluster.url, name, range(OLD))
    return name


def put_entries(url: str, bucket: str, keys: range) -> None:
    put_many(url, bucket, ((f"k{i}", b"v") for i in keys))


@asynccontextmanager
async def connected(url: str, request_timeout: float = 5.0) -> AsyncIterator[SharedConnection]:
    async with connect(url, request_timeout=request_timeout) as jetstream:
        yield SharedConnection(jetstream.connection)


def ordered(url: str, stream: str, end: int = ALL, **more: Any) -> Read:
    """An ordered consumer over ``(0, end]``."""
    created = bucket_info(url, stream.removeprefix("KV_"))["created"]
    request = RangeRequest(stream, KnownStream(created), 0, end, heartbeat=0.1, **more)

    async def read(link: SharedConnection) -> list[int]:
        rows: list[int] = []
        async for frames in OrderedReader(link, request).batches():
            rows += frames.stream_seq.tolist()
        return rows

    return read


def watched(bucket: str, **options: Any) -> Read:
    """A watch up to its end-of-initial-data signal."""

    async def read(link: SharedConnection) -> list[int]:
        info = await JetStream(await link.connection()).stream_info(f"KV_{bucket}")
        watching = Bucket.of(info)
        async with Watch(link, watching, WatchOptions(heartbeat=0.1, **options)) as watch:
            return [entry.revision for entry in await watch.initial()]

    return read


def range_or_watch(kind: str, url: str, bucket: str, end: int) -> Read:
    if kind == "range":
        return ordered(url, f"KV_{bucket}", end)
    return watched(bucket, min_last_revision=end)


@contextmanager
def consumers_on(server: str) -> Iterator[asyncio.Event]:
    """Let ordered readers read from this server; the event is set when a consumer is there."""
    placed = asyncio.Event()

    class Placed(EphemeralConsumer):
        def __init__(self, connections: ReusableConnection, request: RangeRequest) -> None:
            super().__init__(connections, replace(request, server=server))

        async def create(self, position: int, seen_through: int, *, failures: int = 0) -> None:
            await super().create(position, seen_through, failures=failures)
            placed.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "EphemeralConsumer", Placed)
        yield placed


class OverTooSoonError(Exception):
    """A read has all there is, though it was to wait: there was an election meanwhile."""


async def still_waits(reading: asyncio.Future[list[int]]) -> None:
    """Several heartbeats long nothing ends the read."""
    done, _ = await asyncio.wait({reading}, timeout=0.4)
    if done:
        raise too_soon(reading.result())


def too_soon(rows: list[int]) -> OverTooSoonError:
    """What to raise when a read has ended; AssertionError where it took a part for all."""
    assert rows == list(range(1, ALL + 1))
    return OverTooSoonError()


async def on_a_follower(
    cluster: Cluster, read: Callable[[Lagging], Read], then: Callable[[Lagging, Any], Any]
) -> None:
    """Read a bucket whose follower lags, from that follower; ``then`` sees the read under way."""
    for _ in range(_MOST_ELECTIONS):
        bucket = new_bucket(cluster)
        with lagging(cluster, f"KV_{bucket}") as lag:
            assert lag.has == OLD
            try:
                put_entries(lag.leader.url, bucket, range(OLD, ALL))
                (name,) = (name for name, one in cluster.servers.items() if one is lag.follower)
                async with connected(lag.outside.url) as link:
                    with consumers_on(name) as placed:
                        reading = asyncio.ensure_future(read(lag)(link))
                        waiting = asyncio.ensure_future(placed.wait())
                        await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
                        await then(lag, reading)
            except OverTooSoonError:
                continue
            except (NatsSourceError, nats.errors.Error):
                # While there is an election, questions may stay without an answer.
                if cluster.leader_of(f"KV_{bucket}") is lag.leader:
                    raise
                continue
        assert consumers(cluster.url, bucket) == []
        return
    raise AssertionError("each time the read was over before it was looked at")


READS = {
    "range": lambda lag: ordered(lag.outside.url, f"KV_{lag.bucket}"),
    "filter": lambda lag: ordered(
        lag.outside.url, f"KV_{lag.bucket}", filters=(f"$KV.{lag.bucket}.*",)
    ),
    "last per subject": lambda lag: ordered(
        lag.outside.url, f"KV_{lag.bucket}", filters=(f"$KV.{lag.bucket}.>",), last_per_subject=True
    ),
    "watch": lambda lag: watched(lag.bucket),
    "watch of history": lambda lag: watched(lag.bucket, include_history=True),
    "watch, min_last_revision": lambda lag: watched(lag.bucket, min_last_revision=ALL),
}


@pytest.mark.parametrize("kind", READS)
async def test_lagging_follower_is_awaited(cluster: Cluster, kind: str) -> None:
    async def waits(lag: Lagging, reading: asyncio.Future[list[int]]) -> None:
        await still_waits(reading)
        lag.line.release()
        assert await asyncio.wait_for(reading, _DEADLINE) == list(range(1, ALL + 1))

    await on_a_follower(cluster, READS[kind], waits)


async def test_follower_behind_fails_read(cluster: Cluster) -> None:
    async def fails(lag: Lagging, reading: asyncio.Future[list[int]]) -> None:
        with pytest.raises(
            MinLastSequenceError, match=rf"sequence {ALL}: .* reached {OLD} "
        ) as caught:
            raise too_soon(await asyncio.wait_for(reading, _DEADLINE))
        assert (caught.value.code, caught.value.err_code) == (412, 10180)

    await on_a_follower(
        cluster,
        lambda lag: ordered(lag.outside.url, f"KV_{lag.bucket}", catch_up_timeout=0.3),
        fails,
    )


async def test_follower_paused(cluster: Cluster) -> None:
    """Paused with SIGSTOP it delivers nothing at all: another consumer takes over."""
    bucket = new_bucket(cluster)
    cluster.wait_current(f"KV_{bucket}")
    leader, follower = cluster.leader_of(f"KV_{bucket}"), cluster.followers_of(f"KV_{bucket}")[0]
    created = bucket_info(leader.url, bucket)["created"]
    request = RangeRequest(f"KV_{bucket}", KnownStream(created), 0, ALL, heartbeat=0.1)

    async def work() -> None:
        async with connected(leader.url, request_timeout=1.0) as link:
            for _ in range(_MOST_PLACEMENTS):
                reader = OrderedReader(link, request)
                rows: list[int] = []
                async for frames in reader.batches():
                    rows += frames.stream_seq.tolist()
                assert rows == list(range(1, ALL + 1))
                if Rebuild.NO_ANSWER in reader.cursor.rebuilds:
                    return
        raise AssertionError("no consumer was placed on the follower that stands still")

    follower.pause()
    try:
        put_entries(leader.url, bucket, range(OLD, ALL))
        await work()
    finally:
        follower.resume()
    wait_until(lambda: consumers(leader.url, bucket) == [], "no consumers are left")
    cluster.wait_current(f"KV_{bucket}")


# Mirrors


@pytest.fixture(scope="module")
def domains() -> Iterator[HubAndLeaf]:
    with hub_and_leaf() as both:
        yield both


@pytest.fixture
def mirrored(domains: HubAndLeaf) -> Iterator[str]:
    """A bucket at the hub with ``ALL`` entries, and ``KV_<it>`` at the leaf, which has ``OLD``."""
    name = f"far{next(_serial)}"
    create_bucket(domains.hub.url, name, history=5)
    put_entries(domains.hub.url, name, range(OLD))
    make_mirror(domains.leaf.url, f"KV_{name}", f"KV_{name}", source_domain="hub")
    domains.line.hold()
    put_entries(domains.hub.url, name, range(OLD, ALL))
    try:
        yield name
    finally:
        domains.line.release()


@pytest.mark.parametrize("kind", ["range", "watch, min_last_revision"])
async def test_lagging_mirror_is_awaited(domains: HubAndLeaf, mirrored: str, kind: str) -> None:
    url = domains.leaf.url
    async with connected(url) as link:
        reading = asyncio.ensure_future(range_or_watch(kind, url, mirrored, ALL)(link))
        await still_waits(reading)
        domains.line.release()
        assert await asyncio.wait_for(reading, _DEADLINE) == list(range(1, ALL + 1))
    assert consumers(url, mirrored) == []


async def test_mirror_behind_fails_read(domains: HubAndLeaf, mirrored: str) -> None:
    url = domains.leaf.url

    # The mirror leads its own stream: what it lacks is what the hub has.
    assert bucket_state(url, mirrored)["last_seq"] == OLD
    assert bucket_state(domains.hub.url, mirrored)["last_seq"] == ALL
    async with connected(url, request_timeout=1.0) as link:
        with pytest.raises(MinLastSequenceError) as caught:
            await watched(mirrored, min_last_revision=ALL)(link)
        assert (caught.value.code, caught.value.err_code) == (412, 10180)
    assert consumers(url, mirrored) == []


# A sequence that is not there yet


@pytest.mark.parametrize("kind", ["range", "watch, min_last_revision"])
async def test_sequence_in_future(url: str, kind: str) -> None:
    """Nothing is delivered until a publish reaches the sequence; then the read continues."""
    name = f"early{next(_serial)}"
    create_bucket(url, name, history=5)
    put_entries(url, name, range(OLD))
    async with connected(url) as link:
        reading = asyncio.ensure_future(range_or_watch(kind, url, name, OLD + 1)(link))
        await still_waits(reading)
        await asyncio.to_thread(put_entries, url, name, range(OLD, OLD + 1))
        assert await asyncio.wait_for(reading, _DEADLINE) == list(range(1, OLD + 2))
    assert consumers(url, name) == []
