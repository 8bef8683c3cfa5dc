"""The tests' own loops and servers leave nothing open, whatever is under way as they end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.event_loop import ThreadServer, run, until_one_ends
from tests.support.nats.buckets import connected
from tests.support.nats.rogue_server import Rogue
from tests.support.nats.topology import (
    Line,
)
from tests.support.proxy.fault_proxy import Proxy
from tests.support.wait import wait_until, wait_until_async


def sockets() -> set[str]:
    """The sockets that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was the directory's own
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {one for one in found if one.startswith("socket:")}


@contextlib.contextmanager
def nothing_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that the block opens is left to be closed by the garbage collector, or at all."""
    gc.collect()
    before = sockets()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(one.message) for one in warned] == []
    assert sockets() - before == set()
    said = [one.getMessage() for one in caplog.records if one.name == "asyncio"]
    assert [one for one in said if "was destroyed" in one] == []  # a task, with its loop


class Holding(ThreadServer):
    """Pings once, reads, and says nothing more."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"PING\r\n")
        await reader.read()


def end_with_new_connections(server: ThreadServer, count: int, turns: int) -> list[socket.socket]:
    """End a server so many turns of its loop after ``count`` clients have connected."""
    clients: list[socket.socket] = []
    server.__enter__()
    loop, over = server._listens.result()

    def wait(left: int) -> None:
        if left:
            loop.call_soon(wait, left - 1)
        else:
            over.set()

    def connect() -> None:
        clients.extend(socket.create_connection((server.host, server.port)) for _ in range(count))
        wait(turns)

    loop.call_soon_threadsafe(connect)
    server._thread.join(60)
    assert not server._thread.is_alive()
    return clients


@pytest.mark.parametrize("made", [Line, Proxy, lambda _: Rogue()], ids=["Line", "Proxy", "Rogue"])
def test_connections_of_just_now(
    made: Callable[[int], ThreadServer], caplog: pytest.LogCaptureFixture
) -> None:
    """Not accepted, accepted without a task, with one that has not begun, that connects, that is
    connected: whatever a client has come to.
    """
    with nothing_left(caplog), Holding() as holding:
        for turns in range(16):
            clients = end_with_new_connections(made(holding.port), 20, turns)
            for client in clients:
                client.settimeout(60)
                with contextlib.suppress(ConnectionResetError):
                    while client.recv(100):  # a greeting
                        pass
                client.close()


def test_clients_that_never_rest(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()
    counts: list[int] = []
    port = 0

    def connect() -> None:
        while not over.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 60) as one,
            ):
                # Else the listener's backlog would be full soon, and a client wait a second.
                counts.append(len(one.recv(10)))

    with nothing_left(caplog), Holding() as holding:
        for _ in range(20):
            over.clear()
            with contextlib.ExitStack() as stack:
                stack.callback(over.set)  # when the proxy is closed
                proxy = stack.enter_context(Proxy(holding.port))
                port, before = proxy.port, counts.count(6)
                threads = [threading.Thread(target=connect) for _ in range(4)]
                for thread in threads:
                    thread.start()
                wait_until(lambda: counts.count(6) > before + 20, "clients come")  # noqa: B023
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)


def test_a_connection_that_is_not_made_yet(caplog: pytest.LogCaptureFixture) -> None:
    """The proxy's server does not answer, as its backlog is full."""
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        for _ in range(10):
            filling = stack.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(address)
        with (
            nothing_left(caplog),
            Proxy(address[1]) as proxy,
            socket.create_connection(("127.0.0.1", proxy.port)),
        ):
            wait_until(lambda: proxy.connections == 1, "it connects")


def test_a_frozen_connection_that_its_client_has_left(caplog: pytest.LogCaptureFixture) -> None:
    with nothing_left(caplog), Holding() as holding, Proxy(holding.port) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            proxy.freeze()
            client.sendall(b"PING\r\n")
            wait_until(lambda: proxy.connections == 1, "it is served")
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            wait_until(lambda: proxy.connections == 2, "the next one, too")
            proxy.cut()
            assert client.recv(1) == b""


def test_a_port_that_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with (
        nothing_left(caplog),
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="address already in use"),
        Proxy(4222, listen=taken.getsockname()[1]),
    ):
        raise AssertionError


def test_the_server_goes_on_after_a_cut(shared_server: NatsServer) -> None:
    with Proxy(shared_server.port) as proxy:
        for times in range(1, 4):
            with socket.create_connection(("127.0.0.1", proxy.port)) as client:
                client.settimeout(60)
                assert client.recv(5) == b"INFO "
                proxy.cut()
                with contextlib.suppress(ConnectionResetError):
                    while client.recv(10_000):
                        pass
            assert proxy.connections == times


# -- nats-py's sockets ----------------------------------------------------------------------------


class OnlyOnce(Rogue):
    """Greets the first client; what it says to others is no greeting, and it stays with them."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received.append(bytearray())
        if len(self.received) > 1:
            writer.write(b"+OK\r\n")
            await reader.read()
        writer.write(self.greets)
        await reader.readuntil(b"PING\r\n")
        writer.write(b"PONG\r\n")
        await writer.drain()


async def ignored(error: Exception) -> None:
    pass


def test_a_client_whose_attempts_to_connect_again_fail(caplog: pytest.LogCaptureFixture) -> None:
    async def work(server: OnlyOnce) -> None:
        options = {"reconnect_time_wait": 0.01, "max_reconnect_attempts": -1, "error_cb": ignored}
        async with connected(server.url, **options):
            await wait_until_async(lambda: len(server.received) > 5, "frames are received")

    with nothing_left(caplog), OnlyOnce() as server:
        run(work(server))


def test_a_client_whose_server_is_paused(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for ever to send what it still has."""
    monkeypatch.setattr("tests.support.nats.buckets._CLOSE_DEADLINE", 0.1)

    async def work() -> None:
        async with connected(nats_server.url, pending_size=1 << 30) as client:
            nats_server.pause()
            for _ in range(100):
                await client.publish("x", bytes(1_000_000))

    with nothing_left(caplog):
        try:
            run(work())
        finally:
            nats_server.resume()


def test_a_client_whose_server_was_killed(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with connected(nats_server.url, error_cb=ignored) as client:
            await client.publish("x", b"unsent")
            nats_server.kill()

    with nothing_left(caplog):
        run(work())


# -- work -----------------------------------------------------------------------------------------


def test_work_that_fails_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []

    async def beside() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("beside")

    async def work(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        task = asyncio.ensure_future(beside())
        await asyncio.sleep(0)
        assert not task.done()
        assert not writer.is_closing()
        raise LookupError

    with nothing_left(caplog), Holding() as holding:
        with pytest.raises(LookupError):
            run(work(holding.port))
        assert ended == ["beside"]


def test_a_cancellation_that_is_swallowed() -> None:
    """As ``wait_for`` does (Python 3.11) where it comes together with what is waited for."""
    swallowed: list[int] = []

    async def stubborn() -> None:
        while len(swallowed) < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed.append(1)

    async def work() -> str:
        work.task = asyncio.ensure_future(stubborn())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return "done"

    assert run(work()) == "done"
    assert len(swallowed) == 3


def test_until_one_ends() -> None:
    said: list[str] = []

    async def lasting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            said.append("cancelled")

    async def failing() -> None:
        await asyncio.sleep(0)
        raise LookupError

    async def ending() -> None:
        await asyncio.sleep(0)

    with pytest.raises(LookupError):
        run(until_one_ends(lasting(), failing()))
    run(until_one_ends(lasting(), ending()))
    assert said == ["cancelled", "cancelled"]
