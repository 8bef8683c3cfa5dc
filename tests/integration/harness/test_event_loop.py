"""The loops and servers of the tests close their connections and tasks when they end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import warnings
from collections.abc import Iterator

import pytest

from tests.support.event_loop import ThreadServer, run, until_one_ends
from tests.support.proxy.fault_proxy import Proxy


def sockets() -> set[str]:
    """The open sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was the directory's own
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {one for one in found if one.startswith("socket:")}


@contextlib.contextmanager
def nothing_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The block closes all sockets and tasks that it opens, before the garbage collector does."""
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
    """Sends one PING and reads."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"PING\r\n")
        await reader.read()


def end_with_new_connections(server: ThreadServer, count: int, turns: int) -> list[socket.socket]:
    """End a server ``turns`` turns of its loop after ``count`` clients connected."""
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


def test_server_end_closes_new_connections(caplog: pytest.LogCaptureFixture) -> None:
    """Not accepted, accepted without a task, with a task that has not started, connected."""
    with nothing_left(caplog), Holding() as holding:
        for turns in range(16):
            clients = end_with_new_connections(Proxy(holding.port), 20, turns)
            for client in clients:
                client.settimeout(60)
                with contextlib.suppress(ConnectionResetError):
                    while client.recv(100):  # a greeting
                        pass
                client.close()


def test_failed_work_leaves_nothing_open(caplog: pytest.LogCaptureFixture) -> None:
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


def test_until_one_ends_cancels_others() -> None:
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
