"""Each way to authenticate and to encrypt, against a real server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable

import pytest

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.errors import TlsError
from tests.integration.jetstream.connection.authentication import (
    HANDSHAKE_FIRST,
    JWT,
    MAPPED,
    MARKS,
    MUTUAL,
    NKEY,
    PASSWORD,
    SECRET,
    SECURE_WEBSOCKET,
    TLS,
    TOKEN,
    WEBSOCKET,
    Running,
    Way,
    World,
    ask,
    let_in,
    reconnected,
    tls_server,
)

pytestmark = MARKS

WAYS = {
    "user and password": PASSWORD,
    "token": TOKEN,
    "nkey": NKEY,
    "credentials file": JWT,
    "credentials content": Way(JWT.config, lambda world: {"credentials_content": world.content}),
    "credentials file, Windows line ends": Way(
        JWT.config,
        lambda world: {
            "credentials": world.write("crlf.creds", world.content.replace("\n", "\r\n"))
        },
    ),
    "TLS": TLS,
    "TLS, demanded by the server": Way(TLS.config, TLS.client, scheme="nats"),
    "TLS, left to the client": Way(
        lambda world: world.tls() + "allow_non_tls: true", TLS.client, scheme="tls"
    ),
    "TLS handshake first": HANDSHAKE_FIRST,
    "mutual TLS": MUTUAL,
    "mutual TLS, mapped to a user": MAPPED,
    "TLS and credentials": Way(
        lambda world: TLS.config(world) + JWT.config(world),
        lambda world: TLS.client(world) | JWT.client(world),
        scheme="tls",
    ),
    "websocket": WEBSOCKET,
    "websocket with TLS": SECURE_WEBSOCKET,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_client_accepted_before_and_after_restart(
    way: Way, running: Callable[[Way], Running]
) -> None:
    at = running(way)

    async with await Connection.open(at.connection_settings()) as connection:
        first = await ask(connection)
        await asyncio.to_thread(at.server.kill)
        await asyncio.to_thread(at.server.start)
        await reconnected(connection)
        assert (first, await ask(connection)) == ("let in", "let in")


async def test_encryption_is_real(running: Callable[[Way], Running]) -> None:
    """A server with optional TLS receives TLS only where the settings require it."""
    at = running(WAYS["TLS, left to the client"])

    async def work(settings: ConnectionSettings) -> bool:
        async with await Connection.open(settings) as connection:
            transport = connection.client._transport
            assert transport is not None
            return transport._io_writer.get_extra_info("cipher") is not None  # type: ignore[attr-defined]

    assert await work(at.connection_settings())
    assert not await work(ConnectionSettings(servers=(at.server.url,)))


async def test_server_trusted_of_two(world: World, running: Callable[[Way], Running]) -> None:
    good, bad = running(TLS), running(tls_server(lambda world: world.expired))
    for urls in ((bad.url, good.url), (good.url, bad.url)):
        assert await let_in(good.connection_settings(servers=urls)) == "let in"
    with pytest.raises(TlsError, match="has expired"):
        await let_in(good.connection_settings(servers=(bad.url, bad.url), connect_timeout=1.0))


async def test_server_without_tls_receives_nothing() -> None:
    """Not by a real server, which keeps no record: this one greets, and notes what it gets."""
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                info = {"server_id": "x", "version": "2.15.1", "auth_required": True}
                client.sendall(b"INFO " + json.dumps(info).encode() + b"\r\n")
                client.settimeout(10)
                got.append(client.recv(1000))

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"tls://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TlsError, match="nothing was sent"):
            await let_in(ConnectionSettings(servers=(url,), user="me", password=SECRET))
        thread.join(10)
    assert got == [b""]
