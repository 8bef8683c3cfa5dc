"""Reads of the ordered reader that recover, wait for a replica, or end with an error."""

from __future__ import annotations

import threading

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConnectError,
    ConsumerLostError,
    DataLossError,
    MinLastSequenceError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.wire.consumer.cursor import CursorAction, Rebuild
from tests.integration.jetstream.ordered.reads import (
    ALL,
    UNHEARD,
    linked,
    read,
    read_range,
    request_for,
)
from tests.support.nats.buckets import (
    api,
    consumers,
    create_bucket,
    delete_bucket,
    put_many,
)
from tests.support.nats.topology import make_mirror
from tests.support.proxy.fault_proxy import Proxy, is_delivery, is_status

pytestmark = pytest.mark.servers


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
