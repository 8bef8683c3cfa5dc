"""The servers of a nats-py client: which one is next, how long it may take, who the client is.

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

Private names of nats-py in use, verified by
``tests/integration/jetstream/connection/test_client_packages.py``: ``Client._select_next_server``,
``_connect_to_server``, ``_process_connect_init``, ``_server_pool``, ``_current_server`` and
``_transport``; ``Srv.tls_name``; ``WebSocketTransport._ws`` and ``_client``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nats.aio.client import Client, Srv
from nats.aio.transport import WebSocketTransport

from nats_stream_source.connection.nats_py.dial import dial
from nats_stream_source.connection.nats_py.handshake import close_transport
from nats_stream_source.connection.server_url import WEBSOCKET, ServerUrl, UserInfo, tls_name

_MIN_ATTEMPT = 1.0  # seconds for each step of connecting to one server, also a distant one
_CLOSE_DEADLINE = 0.2  # seconds for the end of a websocket that did not respond


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
            addresses = await asyncio.wait_for(dial(client, s), share(servers))
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
