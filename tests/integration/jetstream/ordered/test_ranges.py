"""Ranges that the ordered reader reads: complete, recovered, waited for, or ended with an error."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.connection.inbox import AFTER_EACH, AFTER_MEDIUM, NEVER
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConnectError,
    ConsumerLostError,
    DataLossError,
    MinLastSequenceError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.ordered import consumer
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.wire.consumer.cursor import CursorAction, Rebuild
from tests.support.nats.buckets import (
    api,
    bucket_info,
    consumers,
    create_bucket,
    delete_bucket,
    fill_bucket,
    put,
    put_many,
)
from tests.support.nats.topology import make_mirror
from tests.support.proxy.fault_proxy import Proxy, is_delivery, is_status

pytestmark = pytest.mark.servers

Between = Callable[[OrderedReader], Coroutine[Any, Any, None]]


@asynccontextmanager
async def linked(url: str, **settings: Any) -> AsyncIterator[ReusableConnection]:
    link = ReusableConnection(ConnectionSettings(servers=(url,), **settings))
    try:
        yield link
    finally:
        await link.drop()


async def read(reader: OrderedReader, between: Between | None = None) -> list[int]:
    """The stream sequences of a range; ``between`` runs once, after the first batch."""
    rows: list[int] = []
    async for frames in reader.batches():
        rows += frames.stream_seq.tolist()
        if between is not None:
            await between(reader)
            between = None
    return rows


def request_for(url: str, bucket: str, end: int, start: int = 0, **more: Any) -> RangeRequest:
    known = KnownStream(bucket_info(url, bucket)["created"])
    more = {"heartbeat": 0.1, **more}
    return RangeRequest(f"KV_{bucket}", known, start, end, **more)


async def read_range(
    url: str, request: RangeRequest, between: Between | None = None, **settings: Any
) -> tuple[list[int], OrderedReader]:
    async with linked(url, **settings) as link:
        reader = OrderedReader(link, request)
        return await read(reader, between), reader


ALL = list(range(1, 3001))

UNHEARD = 30.0
"""Seconds: a heartbeat for tests of other things, so that a server that is held up is not lost."""


@pytest.fixture
def filled(nats_server: NatsServer) -> NatsServer:
    """A server with the bucket ``b``: 3,000 revisions of 1 KB, no history limit in the way."""
    create_bucket(nats_server.url, "b", history=64)
    put_many(nats_server.url, "b", ((f"k{i % 100}", b"%d" % i + b"x" * 1000) for i in range(3000)))
    return nats_server


@pytest.mark.parametrize(
    ("start", "end"), [(0, 3000), (0, 1), (999, 1000), (2999, 3000), (10, 2500), (7, 7)]
)
async def test_range_is_complete_and_leaves_nothing(
    filled: NatsServer, start: int, end: int
) -> None:
    request = request_for(filled.url, "b", end, start, heartbeat=UNHEARD)
    rows, reader = await read_range(filled.url, request)
    assert rows == list(range(start + 1, end + 1))
    assert reader.cursor.rebuilds == []
    assert consumers(filled.url, "b") == []


async def test_batches_are_bounded_by_rows_and_by_bytes(filled: NatsServer) -> None:
    async def sizes(**bounds: int) -> list[tuple[int, int]]:
        async with linked(filled.url) as link:
            reader = OrderedReader(link, request_for(filled.url, "b", 3000, **bounds))
            return [(len(frames), frames.nbytes) async for frames in reader.batches()]

    by_rows = await sizes(batch_rows=200)
    assert [rows for rows, _ in by_rows] == [200] * 15
    by_rows = await sizes(batch_rows=700)
    assert sum(rows for rows, _ in by_rows) == 3000
    # Or up to the end of a block of memory.
    assert all(rows == 700 or (rows < 700 and size >= 256 << 10) for rows, size in by_rows[:-1])
    assert 1 <= by_rows[-1][0] <= 700
    by_bytes = await sizes(batch_bytes=100_000)
    assert sum(rows for rows, _ in by_bytes) == 3000
    assert all(50_000 < size <= 100_000 for _, size in by_bytes[:-1])
    alone = await sizes(batch_bytes=10)
    assert [rows for rows, _ in alone] == [1] * 3000


@pytest.mark.parametrize(
    ("arguments", "long", "sizes"),
    [
        ({}, True, AFTER_MEDIUM),
        ({}, False, NEVER),
        ({"eager": True}, True, NEVER),
        ({"eager": True, "accumulate": True}, True, AFTER_EACH),
    ],
)
async def test_bytes_accumulate_for_long_ranges_in_whole_batches_and_as_requested(
    filled: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    long: bool,
    sizes: range,
) -> None:
    monkeypatch.setattr(consumer, "_BULK", 2999 if long else 3000)
    async with linked(filled.url) as link:
        request = request_for(filled.url, "b", 3000, batch_rows=100, **arguments)
        reader = OrderedReader(link, request)
        async for _ in reader.batches():
            if reader._consumer.inbox is not None:
                assert reader._consumer.inbox.accumulate == sizes
                break
        else:
            raise AssertionError("no batch came while the consumer existed")


async def test_message_larger_than_batch(nats_server: NatsServer) -> None:
    create_bucket(nats_server.url, "b")
    put(nats_server.url, "b", "small", b"1")
    put(nats_server.url, "b", "large", b"x" * 900_000)
    request = request_for(nats_server.url, "b", 2, batch_bytes=1000)
    assert (await read_range(nats_server.url, request))[0] == [1, 2]


async def test_filter_ends_range_by_heartbeat(filled: NatsServer) -> None:
    request = request_for(filled.url, "b", 3000, filters=("$KV.b.k7", "$KV.b.k42"))
    rows, reader = await read_range(filled.url, request)
    assert rows == [s for s in ALL if (s - 1) % 100 in (7, 42)]
    assert reader.cursor.seen_through >= 3000


async def test_last_per_subject(filled: NatsServer) -> None:
    request = request_for(filled.url, "b", 3000, last_per_subject=True, filters=("$KV.b.>",))
    assert (await read_range(filled.url, request))[0] == list(range(2901, 3001))


async def test_range_without_its_last_messages_ends(nats_server: NatsServer) -> None:
    url = nats_server.url
    fill_bucket(url, "b", [("a", b"1"), ("b", b"1"), ("c", b"1"), ("c", b"2")], history=1)
    assert (await read_range(url, request_for(url, "b", 3)))[0] == [1, 2]
    api(url, "STREAM.PURGE.KV_b")
    assert (await read_range(url, request_for(url, "b", 2)))[0] == []


async def test_reader_left_early_leaves_nothing(filled: NatsServer) -> None:
    async with linked(filled.url) as link:
        reader = OrderedReader(link, request_for(filled.url, "b", 3000, batch_rows=10))
        batches = reader.batches()
        await batches.__anext__()
        assert len(consumers(filled.url, "b")) == 1
        await batches.aclose()
        assert consumers(filled.url, "b") == []
        # The connection is clean: the next reader gets its own rows only.
        again = OrderedReader(link, request_for(filled.url, "b", 20, 10))
        assert await read(again) == list(range(11, 21))


class Held:
    """Lets the first 2,500 messages through, and neither more nor a word of it until ``over``.

    So what happens after the first batch happens in the middle, however fast the reader is.
    """

    def __init__(self) -> None:
        self.over = False

    def __call__(self, frame: bytes) -> bool:
        if self.over or not (is_delivery(frame) or is_status(frame, b"Idle")):
            return True
        return is_delivery(frame) and int(frame.split(b"\r\n", 1)[0].split(b".")[-4]) <= 2500


async def test_server_paused_while_read(filled: NatsServer) -> None:
    """No PONG: the connection is given up; the consumer that stayed behind is deleted later."""
    held = Held()

    async def freeze(reader: OrderedReader) -> None:
        filled.pause()
        held.over = True
        threading.Timer(4.0, filled.resume).start()  # longer than a PING is waited for

    with Proxy(filled.port, held) as proxy:
        request = request_for(filled.url, "b", 3000, batch_rows=10)
        rows, reader = await read_range(proxy.url, request, freeze)
    assert rows == ALL
    assert Rebuild.RECONNECTED in reader.cursor.rebuilds
    assert consumers(filled.url, "b") == []


async def test_consumer_lost_repeatedly(filled: NatsServer) -> None:
    with Proxy(filled.port, lambda f: not (is_delivery(f) and b".1500." in f)) as proxy:
        request = request_for(filled.url, "b", 3000, attempts=3)
        with pytest.raises(ConsumerLostError, match=r"after sequence 1499: 4 consumers.*gap"):
            await read_range(proxy.url, request)
        assert len(proxy.dropped) >= 4
    assert consumers(filled.url, "b") == []


async def test_large_values_at_end_of_range_are_delivered(nats_server: NatsServer) -> None:
    """The estimate of the last window is wrong: the response that was held back is sent."""
    create_bucket(nats_server.url, "b", history=64)
    put_many(nats_server.url, "b", ((f"k{i % 500}", b"x" * 100) for i in range(30_000)))
    put_many(nats_server.url, "b", ((f"k{i}", b"x" * 900_000) for i in range(25)))
    held = []
    # A heartbeat would tell of the flow control that waits, and be answered first. Without one, the
    # server says nothing more until it has its answer.
    request = request_for(nats_server.url, "b", 30_025, heartbeat=UNHEARD)

    async with linked(nats_server.url) as link:
        reader = OrderedReader(link, request)
        idle = reader.cursor.idle

        def noted() -> CursorAction:
            held.append(reader.cursor.position)
            return idle()

        reader.cursor.idle = noted
        assert await read(reader) == list(range(1, 30_026))
    assert held


async def test_consumer_silent(filled: NatsServer) -> None:
    """As where the inbox prefix is not imported: the advice is another one."""
    with Proxy(filled.port, lambda f: not (is_delivery(f) or is_status(f, b""))) as proxy:
        request = request_for(filled.url, "b", 3000, attempts=1)
        with pytest.raises(ConsumerLostError, match=r"\(missed heartbeat.*'inbox_prefix'") as lost:
            await read_range(proxy.url, request)
        assert proxy.dropped
    assert "request_timeout" not in str(lost.value)


async def test_stream_rolled_back_meanwhile(filled: NatsServer) -> None:
    """A plan beyond the leader's end: the stream has lost what was planned."""
    request = request_for(filled.url, "b", 3001, 2990, catch_up_timeout=0.5)
    with pytest.raises(
        DataLossError, match="rolled back during the read: its last sequence is 3000"
    ):
        await read_range(filled.url, request)
    assert consumers(filled.url, "b") == []


async def test_mirror_without_end_lags(filled: NatsServer) -> None:
    """The upstream may have the message: the error reports lag, not data loss."""
    created = make_mirror(filled.url, "M", "KV_b")["created"]
    request = RangeRequest(
        "M", KnownStream(created), 2990, 3001, heartbeat=0.1, catch_up_timeout=0.5
    )
    with pytest.raises(MinLastSequenceError, match=r"up to sequence 3001: .* has reached 3000 "):
        await read_range(filled.url, request)


async def test_mirror_rolled_back_under_endless_reader(filled: NatsServer) -> None:
    """A mirror without its origin stays empty: the reader's position is not confirmed."""
    mirror = make_mirror(filled.url, "M", "KV_b")
    delete_bucket(filled.url, "b")

    async def recreate(reader: OrderedReader) -> None:
        api(filled.url, "STREAM.DELETE.M")
        api(filled.url, "STREAM.CREATE.M", mirror["config"])

    request = RangeRequest(
        "M", KnownStream(mirror["created"]), 2990, ENDLESS, heartbeat=0.1, eager=True
    )
    with pytest.raises(
        DataLossError, match="rolled back during the read: the mirror's last sequence is 0"
    ):
        await read_range(filled.url, request, recreate)


@pytest.mark.parametrize("replaced", [False, True])
async def test_stream_deleted_while_read(filled: NatsServer, replaced: bool) -> None:
    async def delete(reader: OrderedReader) -> None:
        delete_bucket(filled.url, "b")
        if replaced:
            create_bucket(filled.url, "b")

    # Reading from the end of a long wait: the range's last sequence does not exist yet.
    request = request_for(filled.url, "b", 3005, 2990, batch_rows=1)
    error = DataLossError if replaced else StreamNotFoundError
    with pytest.raises(error, match="was deleted and re-created" if replaced else "not found"):
        await read_range(filled.url, request, delete)


async def test_server_killed(filled: NatsServer) -> None:
    async def kill(reader: OrderedReader) -> None:
        filled.kill()

    request = request_for(filled.url, "b", 3005, 2990, batch_rows=1)
    with pytest.raises(ConnectError):
        await read_range(filled.url, request, kill, connect_timeout=1.0)
