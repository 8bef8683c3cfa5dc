"""The servers of a nats-py client: the next one, its addresses, its time, the client's user.

*Configured servers first.* nats-py tries all known servers in random order, also those that others
announced, and gives each the time that the configured ones need together. Announced servers that
accept and do not respond (behind a firewall, or frozen) would hold up a reconnect for their number
times that. Here all configured servers are tried before each announced one, and each server has its
share of the time, as has each address of its name. That includes the connect of a websocket, which
nats-py does not limit.

*User information of a URL* is decoded, which nats-py omits, and serves announced servers too, as in
nats.go: their addresses have none.

*An announced server has the scheme of the server that announced it.* nats-py gives it ``nats://``
also when it is connected by websocket, where the announced addresses are those of websockets.

*The name in the certificate* lacks the final dot of an absolute name and the zone of an address.

*The addresses of a name.* nats-py gives all of them one time limit and waits for each, so one that
drops packets takes all of it: that of a pod that is gone, in a headless Kubernetes service. Here
the next address is tried when the one before failed, or did not connect for a moment (RFC 8305).
After a failed attempt at the server, the next one begins with another address: one may accept and
not respond.

asyncio's ``happy_eyeballs_delay`` is not in use: uvloop does not have it. aiohttp connects
websockets in the same way.

Private names of nats-py in use, verified by
``tests/integration/jetstream/connection/test_authentication.py``: ``Client._select_next_server``,
``_connect_to_server``, ``_process_connect_init``, ``_server_pool``, ``_current_server``,
``_transport`` and ``_host_is_ip``; ``Srv.tls_name``, ``reconnects`` and ``last_attempt``;
``TcpTransport._io_reader``, ``_io_writer``, ``_bare_io_reader`` and ``_bare_io_writer``;
``WebSocketTransport._ws`` and ``_client``.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import TypeAlias

from nats.aio.client import DEFAULT_BUFFER_SIZE, Client, Srv
from nats.aio.transport import TcpTransport, WebSocketTransport

from nats_stream_source.connection.nats_py.handshake import close_transport
from nats_stream_source.connection.settings import WEBSOCKET, ServerUrl, UserInfo, tls_name

_NEXT_ADDRESS = 0.25  # seconds; the delay that RFC 8305 recommends
_MIN_ATTEMPT = 1.0  # seconds for each step of connecting to one server, also a distant one
_CLOSE_DEADLINE = 0.2  # seconds for the end of a websocket that did not respond

_Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def spread_attempts(client: Client, servers: Sequence[ServerUrl], connect_timeout: float) -> None:
    """Patch a client that connects to ``servers`` within ``connect_timeout`` seconds."""
    select, connect = client._select_next_server, client._connect_to_server
    init = client._process_connect_init
    users = {server.address: server.user_info for server in servers}
    in_urls = any(users.values())
    user = UserInfo()  # of the last configured server

    def share(attempts: int) -> float:
        return min(max(connect_timeout / attempts, _MIN_ATTEMPT), connect_timeout)

    async def select_next_server() -> None:
        pool, last = client._server_pool, client._current_server
        for server in pool:
            if last and last.uri.scheme in WEBSOCKET and server.uri.scheme not in WEBSOCKET:
                server.uri = server.uri._replace(scheme=last.uri.scheme)
        configured = [server.reconnects for server in pool if not server.discovered]
        announced = sum(server.reconnects for server in pool if server.discovered)
        now_configured = sum(configured) <= announced * len(configured)
        pool.sort(key=lambda server: (server.discovered is now_configured, server.reconnects))
        await select()

    async def connect_to_server(s: Srv) -> None:
        servers = len(client._server_pool)
        client.options["connect_timeout"] = share(servers)
        if s.uri.scheme not in WEBSOCKET:
            addresses = await asyncio.wait_for(_dial(client, s), share(servers))
            client.options["connect_timeout"] = share(servers * addresses)
            return
        left = client._transport
        if isinstance(left, WebSocketTransport) and left._ws is not None:
            # Of a failed attempt; with wss nats-py would continue on it.
            await close_transport(client, _CLOSE_DEADLINE)
            if left._client is not None:  # the server did not respond to the close
                await left._client.close()
            client._transport = None
        await asyncio.wait_for(connect(s), share(servers))

    async def process_connect_init() -> None:
        nonlocal user
        server = client._current_server
        assert server is not None
        if in_urls:
            if not server.discovered:
                user = users.get(server.uri.netloc) or UserInfo()
            client.options.update(user=user.user, password=user.password, token=user.token)
        server.tls_name = tls_name(server.tls_name or server.uri.hostname or "")
        await init()
        for known in client._server_pool:
            known.reconnects = 0  # failed attempts since the client was last connected

    client._select_next_server = select_next_server  # type: ignore[method-assign]
    client._connect_to_server = connect_to_server  # type: ignore[method-assign]
    client._process_connect_init = process_connect_init  # type: ignore[method-assign]


async def _dial(client: Client, server: Srv) -> int:
    """Open the transport of ``client`` to ``server``; returns the number of its addresses."""
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
