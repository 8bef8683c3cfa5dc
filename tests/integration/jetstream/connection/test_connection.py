"""Connections and requests: every failure is named, in time, without secrets; cancelled callers."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nats_stream_source.connection.authentication import Authentication
from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.embedded import NatsServer, free_port
from nats_stream_source.errors import (
    ConfigurationError,
    ConnectError,
    InvalidNameError,
    JetStreamNotEnabledError,
    RequestTimeoutError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from tests.support.event_loop import ThreadServer
from tests.support.nats.rogue_server import greeting
from tests.support.proxy.fault_proxy import Delay, Proxy

pytestmark = pytest.mark.servers


def settings(url: str, **more: Any) -> ConnectionSettings:
    more = {"connect_timeout": 20.0, "request_timeout": 20.0, **more}
    return ConnectionSettings(servers=(url,), **more)


async def info_of(url: str, stream: str = "none", **more: Any) -> Any:
    async with await Connection.open(settings(url, **more)) as connection:
        return await JetStream(connection).stream_info(stream)


async def test_server_missing() -> None:
    port = free_port()
    with pytest.raises(ConnectError, match=r"within 1 s \('connect_timeout'\): connection refused"):
        await info_of(f"nats://127.0.0.1:{port}", connect_timeout=1.0)


async def test_server_missing_without_retry() -> None:
    """Each of several servers is tried before the failure, which does not wait for the deadline."""
    ports = [free_port() for _ in range(2)]
    urls = tuple(f"nats://127.0.0.1:{port}" for port in ports)
    with pytest.raises(ConnectError, match=f"{urls[0]}, {urls[1]}: connection refused"):
        await asyncio.wait_for(Connection.open(ConnectionSettings(urls), retry=False), 8)
    with NatsServer() as server:
        some = ConnectionSettings((urls[0], server.url, urls[1]))
        await (await Connection.open(some, retry=False)).close()


class Full(ThreadServer):
    """A server that refuses one more client, with an error that only the first client receives.

    A real one sends INFO and the error and closes at once. In seven of eight cases the data that a
    client has sent by then makes its system drop what it has not read yet.
    """

    turned_away = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.turned_away += 1
        writer.write(greeting())
        await reader.readuntil(b"PING\r\n")
        if self.turned_away == 1:
            writer.write(b"-ERR 'maximum connections exceeded'\r\n")
            await reader.read()
        else:
            at_once = struct.pack("ii", 1, 0)
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)


async def test_server_full_reports_reason() -> None:
    with Full() as full:
        with pytest.raises(ConnectError, match=r"connect_timeout.*: nats: 'maximum connections"):
            await info_of(f"nats://127.0.0.1:{full.port}", connect_timeout=2.0)
        assert full.turned_away > 2


async def test_server_far_away_among_many(shared_server: NatsServer) -> None:
    """Many named servers must leave enough time for the response of a slow one."""
    dead = f"nats://127.0.0.1:{free_port()}"

    def slowly(frame: bytes) -> Delay | bool:
        return Delay(0.6) if frame.startswith(b"CONNECT ") else True

    with Proxy(shared_server.port, upward=slowly) as proxy:
        many = ConnectionSettings(servers=(*[dead] * 39, proxy.url), connect_timeout=20.0)
        async with await Connection.open(many) as connection:
            assert await connection.alive(20)
        assert any(frame.startswith(b"CONNECT ") for frame in proxy.withheld)


def test_error_of_other_origin_loses_secrets() -> None:
    given = settings("nats://me:hunter2@127.0.0.1:1", password="hunter3", token="hunter4")
    text = Authentication(given).redact(OSError("hunter2 and hunter3 and hunter4 at me"))
    assert text == "*** and *** and *** at ***"


async def test_jetstream_missing_behind_prefix(url: str) -> None:
    with pytest.raises(JetStreamNotEnabledError, match="'domain' or 'api_prefix'"):
        await info_of(url, api_prefix="$JS.elsewhere.API")


async def test_stream_missing(url: str) -> None:
    with pytest.raises(StreamNotFoundError) as caught:
        await info_of(url)
    assert (caught.value.code, caught.value.err_code) == (404, 10059)


async def test_name_invalid_in_subject(url: str) -> None:
    with pytest.raises(InvalidNameError, match=r"'\$JS\.API\.STREAM\.INFO\.a b'"):
        await info_of(url, "a b")


async def test_server_stops_responding(nats_server: NatsServer) -> None:
    connection = await Connection.open(settings(nats_server.url, request_timeout=1.0))
    try:
        nats_server.pause()
        assert connection.client.is_connected
        with pytest.raises(RequestTimeoutError, match="'request_timeout'"):
            await JetStream(connection).stream_info("none")
        assert not await connection.alive(0.2)
    finally:
        nats_server.resume()
        await connection.close()


async def test_close_of_dead_connection_raises_nothing(nats_server: NatsServer) -> None:
    """A broken pipe at the close must not hide the first failure."""
    connection = await Connection.open(settings(nats_server.url))
    nats_server.kill()
    for _ in range(20):
        await connection.client.publish("x", b"y" * 100_000)
    await connection.close()
    assert connection.client.is_closed
    with pytest.raises(ConnectError):
        await connection.open_inbox("x")
    with pytest.raises(ConnectError):
        await JetStream(connection).stream_info("none")


async def test_inbox_of_invalid_subject(url: str) -> None:
    with pytest.raises(InvalidNameError, match=r"'inbox_prefix' is 'a\.\.b', expected a subject"):
        await Connection.open(settings(url, inbox_prefix="a..b"))
    async with await Connection.open(settings(url)) as connection:
        with pytest.raises(InvalidNameError, match=r"subscribe to 'a\.\.b': expected tokens"):
            await connection.open_inbox("a..b")


async def test_websockets_and_others_do_not_mix(url: str) -> None:
    both = ConnectionSettings(servers=(url, "ws://127.0.0.1:1"))
    with pytest.raises(ConfigurationError, match="do not mix"):
        await Connection.open(both)


@pytest.fixture
async def link(nats_server: NatsServer) -> AsyncIterator[ReusableConnection]:
    link = ReusableConnection(settings(nats_server.url))
    yield link
    await link.drop()


async def test_kept_connection_dead_is_replaced(link: ReusableConnection) -> None:
    first = await link.connection()
    same = await link.connection(fresh=0)
    await first.close()
    other = await link.connection()
    assert (first is same, first is other) == (True, False)


async def test_concurrent_callers_share_one_connection(link: ReusableConnection) -> None:
    """Planners of several streams start at the same time; a second connection would remain open."""
    first, *others = await asyncio.gather(*(link.connection() for _ in range(3)))
    assert all(other is first for other in others)


async def test_kept_connection_survives_restart(
    nats_server: NatsServer, link: ReusableConnection
) -> None:
    await link.connection()
    nats_server.restart()  # the loop does not run meanwhile, as between two tasks
    assert await (await link.connection(fresh=0)).alive(20)


@pytest.mark.parametrize("steps", range(0, 60, 3))
async def test_connection_closed_during_reconnect(url: str, steps: int) -> None:
    """At any step of the reconnect: no task continues, no socket is left open."""
    connection = await Connection.open(settings(url))
    connection.reconnect()
    for _ in range(steps):
        await asyncio.sleep(0)
    await connection.close()
    assert connection.client.is_closed
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    gc.collect()  # what was left open is told here


async def test_connection_closed_while_reconnect_ignores_cancellation(
    url: str,
) -> None:
    """As with ``wait_for`` up to Python 3.11: the reconnect continues, and opens a socket."""
    connection = await Connection.open(settings(url))
    client, vain, begun = connection.client, 0, asyncio.Event()
    connect = client._connect_to_server

    async def stubborn(server: Any) -> None:
        nonlocal vain
        if not begun.is_set():
            begun.set()
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                vain += 1
        await connect(server)

    client._connect_to_server = stubborn  # type: ignore[assignment]
    connection.reconnect()
    await asyncio.wait_for(begun.wait(), 60)
    await connection.close()
    assert vain, "it was cancelled"
    assert len(asyncio.all_tasks()) == 1
    gc.collect()


_TIMEOUT = 0.3  # seconds


@pytest.mark.parametrize("turns", range(5))
async def test_greeting_after_deadline(turns: int) -> None:
    """And silence after it: connecting ends with an error, and does not begin again."""
    loop = asyncio.get_running_loop()
    greeted = 0
    deadline = loop.time() + _TIMEOUT
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal greeted
        if not greeted:
            greeted += 1
            await asyncio.sleep(deadline - loop.time() - 0.02)
            writer.write(greeting())
            for _ in range(turns):
                await asyncio.sleep(0)
            # The bytes and the deadline come in one turn.
            time.sleep(max(0.0, deadline + 0.01 - loop.time()))  # noqa: ASYNC251
        await over.wait()
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    settings = ConnectionSettings(servers=(url,), connect_timeout=_TIMEOUT)
    opening = asyncio.ensure_future(Connection.open(settings))
    done, _ = await asyncio.wait({opening}, timeout=20)
    assert done, "it goes on and on"
    with pytest.raises(ConnectError):
        opening.result()
    over.set()
    server.close()
    await asyncio.sleep(0.05)
    assert greeted == 1


async def test_close_cancelled(url: str) -> None:
    """The connection closes nevertheless, and the cancelled task is cancelled."""
    tried = forgotten = 0
    for turns in range(1, 60):
        settings = ConnectionSettings(servers=(url,), connect_timeout=20.0)
        connection = await Connection.open(settings)
        if turns % 2:
            connection.reconnect()
        went_on = False

        async def caller(connection: Connection = connection) -> None:
            nonlocal went_on
            await connection.close()
            went_on = True
            await asyncio.sleep(0)

        task = asyncio.ensure_future(caller())
        for _ in range(turns):
            await asyncio.sleep(0)
        closed = went_on
        if not task.done():
            tried += not closed
            task.cancel()
        await asyncio.wait({task})
        forgotten += went_on and not closed
        assert connection.client.is_closed
        assert asyncio.all_tasks() == {asyncio.current_task()}
    assert tried, "some were cancelled before they had closed"
    assert not forgotten
