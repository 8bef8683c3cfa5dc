"""Connecting to all addresses of a server's name: an address that drops packets costs a moment.

nats-py gives all addresses one time limit and waits for each, so one that drops packets takes all
of it: that of a pod that is gone, in a headless Kubernetes service. Here the next address is tried
when the one before failed, or did not connect for a moment (RFC 8305). After a failed attempt at
the server, the next one begins with another address: one may accept and not respond.

asyncio's ``happy_eyeballs_delay`` is not in use: uvloop does not have it. aiohttp connects
websockets in the same way.

Private names of nats-py in use, verified by
``tests/integration/jetstream/connection/test_client_packages.py``: ``Client._transport`` and
``_host_is_ip``; ``Srv.reconnects`` and ``last_attempt``; ``TcpTransport._io_reader``,
``_io_writer``, ``_bare_io_reader`` and ``_bare_io_writer``.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import TypeAlias

from nats.aio.client import DEFAULT_BUFFER_SIZE, Client, Srv
from nats.aio.transport import TcpTransport

_NEXT_ADDRESS = 0.25  # seconds; the delay that RFC 8305 recommends

_Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def dial(client: Client, server: Srv) -> int:
    """Open the transport of ``client`` to ``server``; returns the number of its addresses.

    Raises:
        OSError: the name cannot be resolved, or each address failed.
    """
    server.last_attempt = time.monotonic()
    host = server.uri.hostname or ""
    addresses = [host] if client._host_is_ip(host) else await _resolve(host)
    first = server.reconnects % len(addresses)
    transport = TcpTransport()  # type: ignore[no-untyped-call]
    reader, writer = await _open([*addresses[first:], *addresses[:first]], server.uri.port or 0)
    transport._bare_io_reader = transport._io_reader = reader
    transport._bare_io_writer = transport._io_writer = writer
    client._transport = transport
    return len(addresses)


async def _resolve(host: str) -> list[str]:
    """The addresses of a name without repetitions, those of a link with their zone."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    with_zones = (
        f"{address[0]}%{address[3]}" if len(address) == 4 and address[3] else str(address[0])
        for *_, address in found
    )
    return list(dict.fromkeys(with_zones))


async def _open(addresses: Sequence[str], port: int) -> _Streams:
    """Connect to the first address that accepts; OSError if each failed."""
    waiting = list(addresses)
    running: set[asyncio.Task[_Streams]] = set()
    errors: list[BaseException] = []
    try:
        while waiting or running:
            if waiting:
                opening = asyncio.open_connection(waiting.pop(0), port, limit=DEFAULT_BUFFER_SIZE)
                running.add(asyncio.create_task(opening))
            done, _ = await asyncio.wait(
                running,
                timeout=_NEXT_ADDRESS if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                running.discard(task)
                if (error := task.exception()) is None:
                    return task.result()
                errors.append(error)
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(_abort)
    if len(errors) == 1:
        raise errors[0]
    raise OSError(f"Multiple exceptions: {', '.join(map(str, errors))}")


def _abort(task: asyncio.Task[_Streams]) -> None:
    """Close the connection of a task that lost against another address."""
    if not task.cancelled() and task.exception() is None:
        task.result()[1].transport.abort()
