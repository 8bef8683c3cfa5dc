"""The bridge to nats-py: private names exist, both sides get what is theirs, in order."""

from __future__ import annotations

import asyncio
import inspect
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport, Transport

from nats_stream_source.connection.inbox import AFTER_EACH, AFTER_MEDIUM, NEVER
from nats_stream_source.connection.nats_py import socket_tap
from nats_stream_source.connection.nats_py.socket_tap import (
    _BufferedReader,
    open_inbox,
    tapped_client,
)
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.framing.frames import Framer, Frames
from tests.support.nats.buckets import flushed
from tests.support.nats.certificates import Authority
from tests.support.nats.topology import configured_server
from tests.support.wait import wait_until_async
from tests.unit.wire.reference.streams import deliveries

pytestmark = pytest.mark.servers


@asynccontextmanager
async def connected(client: Client, url: str, **options: Any) -> AsyncIterator[Client]:
    await client.connect(url, **options)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def reconnecting(url: str, **options: Any) -> AsyncIterator[tuple[Client, asyncio.Event]]:
    """A tapped client, and the event of its reconnect."""
    again = asyncio.Event()

    async def on_reconnect() -> None:
        again.set()

    options |= {"reconnect_time_wait": 0.05, "max_reconnect_attempts": -1}
    async with connected(tapped_client(), url, reconnected_cb=on_reconnect, **options) as client:
        yield client, again


async def echo(message: Msg) -> None:
    await message.respond(message.data)


def test_private_names_of_nats_py_exist() -> None:
    parser = Client()._ps
    assert inspect.iscoroutinefunction(parser.parse)
    assert list(inspect.signature(parser.parse).parameters) == ["data"]
    assert callable(parser.reset)
    assert Client()._transport is None
    assert callable(Transport.close)
    # The read loop must ask the client for its parser each time, not keep one.
    read_loop = inspect.getsource(Client._read_loop)
    assert "await self._ps.parse(b)" in read_loop
    # And of the transport it must use nothing but these, which the bridge stands in for.
    assert set(re.findall(r"self\._transport\.(\w+)", read_loop)) == {"at_eof", "read"}
    transport = TcpTransport()
    assert transport._io_reader is None
    assert transport._io_writer is None
    assert "await self._io_reader.read(" in inspect.getsource(TcpTransport.read)
    assert "self._io_reader.at_eof()" in inspect.getsource(TcpTransport.at_eof)
    # The parser is reset before a new connection's first bytes are read, and not after.
    init = inspect.getsource(Client._process_connect_init)
    assert init.index("self._ps.reset()") < init.index("self._read_loop()")


async def test_stream_end_before_first_bytes_is_noticed() -> None:
    """A server closes at once after the handshake (2.10 and 2.11 send nothing more then)."""
    lost, connected = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","max_payload":1024,"headers":true}\r\n')
        await reader.readuntil(b"PING\r\n")
        writer.write(b"PONG\r\n")
        await connected.wait()
        writer.close()

    async def on_disconnect() -> None:
        lost.set()

    assert asyncio.StreamReader()._eof is False  # type: ignore[attr-defined]
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = tapped_client()
    await client.connect(
        f"nats://127.0.0.1:{port}", allow_reconnect=False, disconnected_cb=on_disconnect
    )
    for _ in range(10):  # turns of the loop, in which the read loop begins to wait
        await asyncio.sleep(0)
    connected.set()
    await asyncio.wait_for(lost.wait(), 60)
    await client.close()
    server.close()
    await server.wait_closed()


async def test_tapped_and_ordinary_subscriptions_side_by_side(url: str) -> None:
    """Interleaved messages, payloads that look like frames, and frames larger than a read."""
    payloads = [b"x" * (i * 37 % 5000) + b"\r\nMSG tapped 1 3\r\nabc\r\n" for i in range(400)]
    payloads[7] = b"y" * 900_000

    plain: list[bytes] = []
    tapped: list[Frames] = []

    async def on_message(message: Msg) -> None:
        plain.append(message.data)

    async with connected(tapped_client(), url) as client:
        inbox = await open_inbox(client, "tapped")
        await client.subscribe("plain", cb=on_message)
        for index, payload in enumerate(payloads):
            headers = {"N": str(index)} if index % 3 == 0 else None
            await client.publish("tapped", payload, headers=headers)
            await client.publish("plain", payload)
            if index % 50 == 0:
                await client.flush()
        # Not flush(): nats-py's PING overtakes the messages that it still buffers.

        def all_received() -> bool:
            tapped.extend(inbox.take())
            return min(len(plain), sum(map(len, tapped))) >= len(payloads)

        await wait_until_async(all_received, "all messages")
        await inbox.close()
    assert plain == payloads
    assert [frames.payload(i) for frames in tapped for i in range(len(frames))] == payloads


async def test_inbox_closed_under_load_leaves_other_frames_whole(url: str) -> None:
    """A frame that is cut by the read's end must not reach nats-py's parser in two halves."""
    answers = []
    async with (
        connected(tapped_client(), url) as client,
        connected(Client(), url) as writer,
    ):
        await writer.subscribe("echo", cb=echo)
        await flushed(writer)
        for round_ in range(5):
            inbox = await open_inbox(client, "flood")
            await flushed(client)
            for _ in range(300):
                await writer.publish("flood", b"z" * 1000)
            await writer.flush()
            assert await inbox.wait(5)
            await inbox.close()
            answers.append((await client.request("echo", b"%d" % round_, 5)).data)
    assert answers == [b"0", b"1", b"2", b"3", b"4"]


async def test_subscriptions_of_both_kinds_survive_reconnect(nats_server: NatsServer) -> None:
    async with reconnecting(nats_server.url) as (client, again):
        inbox = await open_inbox(client, "tapped")
        await client.subscribe("echo", cb=echo)
        await asyncio.to_thread(nats_server.restart)
        await asyncio.wait_for(again.wait(), 60)
        await client.publish("tapped", b"1")
        answer = (await client.request("echo", b"2", 5)).data
        frames = sum(len(one) for one in inbox.take())
        await inbox.close()
        assert (frames, answer) == (1, b"2")


async def flood(client: Client, count: int = 300, size: int = 4000) -> list[bytes]:
    """Send to a tapped inbox of the same connection; the payloads that arrived."""
    inbox = await open_inbox(client, "flood")
    sent = [b"%06d" % i + b"\r\n" * (size // 2) for i in range(count)]
    found: list[bytes] = []
    for payload in sent:
        await client.publish("flood", payload)
    await client.flush()
    while len(found) < count and await inbox.wait(5):
        found += [one.payload(i) for one in inbox.take() for i in range(len(one))]
    await inbox.close()
    assert found == sent
    return found


def reads_of(client: Client) -> object:
    assert client._transport is not None
    return client._transport._io_reader  # type: ignore[attr-defined]


async def test_tap_reads_past_stream_reader(url: str) -> None:
    async with connected(tapped_client(), url) as client:
        await client.flush()
        assert isinstance(reads_of(client), _BufferedReader)
        await flood(client)


async def test_unknown_transport_uses_stream_reader(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Websocket and other versions of nats-py use this path: slower, with the same result."""
    monkeypatch.setattr(socket_tap, "TcpTransport", type("Another", (), {}))

    async with connected(tapped_client(), url) as client:
        await flood(client)
        assert isinstance(reads_of(client), asyncio.StreamReader)


async def test_slow_read_loop_makes_server_wait(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_tap, "_MAX_UNREAD", 100_000)
    paused: list[int] = []

    async with (
        connected(tapped_client(), url) as client,
        connected(Client(), url) as writer,
    ):
        inbox = await open_inbox(client, "behind")
        await flushed(client)
        reads = reads_of(client)
        assert isinstance(reads, _BufferedReader)
        free = asyncio.Event()

        # A parser that does not come back, as one that waits in nats-py's own parser.
        parse = client._ps.parse

        async def slow(data: bytes = b"") -> None:
            await parse(data)
            await free.wait()

        client._ps.parse = slow
        for _ in range(2500):
            await writer.publish("behind", bytes(4000))
        await writer.flush()
        await wait_until_async(lambda: reads._paused, "the reader pauses")
        paused.append(reads._unread)
        free.set()
        count = 0
        while count < 2500 and await inbox.wait(5):
            count += sum(map(len, inbox.take()))
        assert count == 2500
    assert 100_000 < paused[0] < 2_000_000  # of 10,000,000


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ca")


@pytest.fixture
def tls_server(authority: Authority) -> Iterator[NatsServer]:
    pair = authority.issue("server")
    config = f'tls {{ cert_file: "{pair.cert}", key_file: "{pair.key}" }}\n'
    with configured_server(config) as server:
        yield server


async def test_tls_tap_reads_past_stream_reader(
    authority: Authority, tls_server: NatsServer
) -> None:
    """nats-py's TLS upgrade puts another transport and another stream in place."""
    context = ssl.create_default_context(cafile=authority.path)
    url = tls_server.url.replace("nats://", "tls://")
    async with reconnecting(url, tls=context) as (client, again):
        await flood(client)
        assert isinstance(reads_of(client), _BufferedReader)
        await asyncio.to_thread(tls_server.restart)
        await asyncio.wait_for(again.wait(), 60)
        await flood(client, 600)
        assert isinstance(reads_of(client), _BufferedReader)


async def test_few_frames_that_wait_do_not_keep_what_came_with_them(
    url: str,
) -> None:
    async with connected(tapped_client(), url) as client:
        slow = await open_inbox(client, "slow")
        await client.publish("slow", b"first")
        await flushed(client)
        for _ in range(3):
            await client.publish("slow", b"few")
            await flood(client)
        assert await slow.wait(5)
        first, *others = slow.take()
        assert len(first) == 1
        assert sum(map(len, others)) == 3
        assert all(len(one.buffer) == one.nbytes for one in others)
        await slow.close()


class FakeTransport:
    """Records when reading is paused and resumed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def get_protocol(self) -> Any:
        return mock.Mock()

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


def received(reader: _BufferedReader, nbytes: int) -> None:
    """Let the reader receive so many bytes, in as many pieces as its memory has."""
    while nbytes:
        piece = min(nbytes, len(reader.get_buffer(-1)))
        reader.buffer_updated(piece)
        nbytes -= piece


@pytest.mark.parametrize(
    ("nbytes", "frames", "pauses"),
    [
        (1000, 10, False),
        (16 << 10, 100, True),
        (1023 << 10, 10_000, True),
        (1 << 20, 10_000, False),
        (64 << 10, 17, True),
        (64 << 10, 16, False),  # large frames
    ],
)
async def test_bytes_accumulate_after_medium_read(nbytes: int, frames: int, pauses: bool) -> None:
    transport: Any = FakeTransport()
    reader = _BufferedReader(Framer(), transport, lambda _: False)
    received(reader, nbytes)
    assert await reader.read(1) == b""
    reader.accumulate(frames, AFTER_MEDIUM)
    reader.accumulate(frames, AFTER_MEDIUM)
    assert transport.calls == ["pause"] * pauses
    await asyncio.sleep(10 * socket_tap._ACCUMULATE)
    assert transport.calls == ["pause", "resume"] * pauses


async def test_deliveries_overtake_nothing() -> None:
    """Deliveries go to their inbox at once, unless the read loop has earlier frames."""
    client = tapped_client()
    tap: Any = client._ps
    reader: Any = mock.Mock()
    tap._started, tap._buffered = True, reader
    client._process_pong = mock.AsyncMock()
    arrived: list[int] = []
    inbox: Any = mock.Mock(accumulate=NEVER)
    inbox.put = lambda frames: arrived.extend(Deliveries.of(frames).consumer_seq.tolist())
    tap.inboxes[1] = inbox

    def receive(data: bytes, buffered: Any = reader) -> bool:
        tap._framer.room()[: len(data)] = data
        tap._framer.received(len(data))
        needless: bool = tap.deliver(buffered)
        return needless

    second = deliveries(65)
    assert receive(deliveries(1) + second[:9])
    assert receive(second[9:20])
    assert receive(second[20:])
    assert (arrived, tap.reads) == ([*range(1, 129)], 3)
    assert not receive(b"PONG\r\n" + deliveries(129, 1))
    assert not receive(deliveries(130))
    assert arrived[-1] == 128
    await tap.parse()
    assert (arrived, client._process_pong.await_count) == ([*range(1, 194)], 1)
    assert receive(deliveries(194))
    assert not receive(deliveries(1, sid=2))  # no inbox: nats-py may have the subscription
    await tap.parse()
    assert not receive(b"PONG\r\n" + deliveries(258, 1))
    assert not receive(b"MSG of nothing\r\n")
    assert not receive(deliveries(259))
    with pytest.raises(nats.errors.ProtocolError):
        await tap.parse()
    assert arrived == [*range(1, 259)]
    tap.reset()
    tap._buffered = reader
    assert not receive(deliveries(259), mock.Mock())  # the reader of an old connection
    assert arrived[-1] == 258


async def test_lost_connection_is_not_resumed() -> None:
    transport: Any = FakeTransport()
    reader = _BufferedReader(Framer(), transport, lambda _: False)
    received(reader, 100 << 10)
    await reader.read(1)
    reader.accumulate(1000, AFTER_MEDIUM)
    reader.connection_lost(None)
    await asyncio.sleep(10 * socket_tap._ACCUMULATE)
    assert transport.calls == ["pause"]
    assert reader.at_eof()


@pytest.mark.parametrize("encrypted", [False, True])
async def test_bulk_inbox_receives_all(
    shared_server: NatsServer,
    authority: Authority,
    tls_server: NatsServer,
    encrypted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a pause after every read, a request between them included."""
    pauses = mock.Mock(wraps=_BufferedReader._accumulated)
    monkeypatch.setattr(_BufferedReader, "_accumulated", lambda reader: pauses(reader))
    server = tls_server if encrypted else shared_server
    options: dict[str, Any] = {}
    if encrypted:
        options["tls"] = ssl.create_default_context(cafile=authority.path)
    url = server.url.replace("nats://", "tls://") if encrypted else server.url
    async with (
        connected(tapped_client(), url, **options) as client,
        connected(Client(), url, **options) as writer,
    ):
        inbox = await open_inbox(client, "bulk")
        inbox.accumulate = AFTER_EACH
        await flushed(client)
        for number in range(3000):
            await writer.publish("bulk", b"%d" % number * 100)
        await writer.flush()
        count = 0
        while count < 3000 and await inbox.wait(5):
            count += sum(map(len, inbox.take()))
            await flushed(client)
        assert count == 3000
        assert pauses.call_count >= 1


async def test_frames_follow_buffer_of_client(jetstream: JetStream) -> None:
    connection = jetstream.connection
    client = connection.client
    received = await client.subscribe("a")
    client._pending.append(b"PUB a 1\r\n1\r\n")
    client._pending_data_size += 1
    await connection.writer.write(memoryview(b"PUB a 1\r\n2\r\nPUB a 1\r\n3\r\n"))
    await client.publish("a", b"4")
    found = [(await received.next_msg(timeout=5)).data for _ in range(4)]
    assert found == [b"1", b"2", b"3", b"4"]


async def test_lost_connection_is_os_error(nats_server: NatsServer) -> None:
    async with connect(nats_server.url) as jetstream:
        connection = jetstream.connection
        nats_server.kill()
        await wait_until_async(lambda: not connection.online.is_set(), "the connection is lost")
        with pytest.raises(OSError, match="not connected"):
            await connection.writer.write(memoryview(b"PUB a 0\r\n\r\n"))
