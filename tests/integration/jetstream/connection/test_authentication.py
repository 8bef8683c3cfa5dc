"""Each way to authenticate and to encrypt, renewed files, and packages that are not installed."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from nats.aio.client import Client, Srv
from nats.aio.transport import TcpTransport, WebSocketTransport

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.errors import ConfigurationError, NatsSourceError, TlsError
from tests.integration.jetstream.connection import authentication as ways
from tests.integration.jetstream.connection.authentication import (
    MARKS,
    SECRET,
    Running,
    Way,
    World,
    ask,
    let_in,
    reconnected,
    tls_server,
)
from tests.support.nats.certificates import Pair
from tests.support.nats.rogue_server import greeting
from tests.support.wait import wait_until_async

pytestmark = MARKS


WAYS = {
    "user and password": ways.PASSWORD,
    "token": ways.TOKEN,
    "nkey": ways.NKEY,
    "credentials file": ways.JWT,
    "credentials content": Way(
        ways.JWT.config, lambda world: {"credentials_content": world.content}
    ),
    "credentials file, Windows line ends": Way(
        ways.JWT.config,
        lambda world: {
            "credentials": world.write("crlf.creds", world.content.replace("\n", "\r\n"))
        },
    ),
    "TLS": ways.TLS,
    "TLS, demanded by the server": Way(ways.TLS.config, ways.TLS.client, scheme="nats"),
    "TLS, left to the client": Way(
        lambda world: world.tls() + "allow_non_tls: true", ways.TLS.client, scheme="tls"
    ),
    "TLS handshake first": ways.HANDSHAKE_FIRST,
    "mutual TLS": ways.MUTUAL,
    "mutual TLS, mapped to a user": ways.MAPPED,
    "TLS and credentials": Way(
        lambda world: ways.TLS.config(world) + ways.JWT.config(world),
        lambda world: ways.TLS.client(world) | ways.JWT.client(world),
        scheme="tls",
    ),
    "websocket": ways.WEBSOCKET,
    "websocket with TLS": ways.SECURE_WEBSOCKET,
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
    good, bad = running(ways.TLS), running(tls_server(lambda world: world.expired))
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
                client.sendall(greeting(auth_required=True))
                client.settimeout(10)
                got.append(client.recv(1000))

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"tls://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TlsError, match="nothing was sent"):
            await let_in(ConnectionSettings(servers=(url,), user="me", password=SECRET))
        thread.join(10)
    assert got == [b""]


async def test_renewed_file_is_used_at_next_reconnect(
    world: World, running: Callable[[Way], Running]
) -> None:
    """Also where the file was missing or half written in between: nats-py must not give up."""
    at = running(ways.JWT)
    path = world.write("renewed.creds", world.operator.credentials())
    write = Path(path).write_text
    seen: list[Exception] = []

    async with await Connection.open(at.connection_settings(credentials=path)) as connection:
        classify = connection._failures.classify

        def classifying(error: Exception) -> NatsSourceError | None:
            if (permanent := classify(error)) is not None:
                seen.append(permanent)
            return permanent

        connection._failures.classify = classifying
        write("")
        await asyncio.to_thread(at.server.kill)
        await asyncio.to_thread(at.server.start)
        await wait_until_async(lambda: seen, "the error is reported")
        write(world.operator.credentials())
        await reconnected(connection)
        assert await ask(connection) == "let in"
    assert isinstance(seen[0], ConfigurationError)


async def test_renewed_client_certificate_is_used_at_next_reconnect(
    world: World, running: Callable[[Way], Running]
) -> None:
    at = running(ways.MUTUAL)
    other = running(
        Way(lambda world: ways.MUTUAL.config(world).replace(world.ca.path, world.other_ca.path))
    )
    mine = [Path(world.write(name, "")) for name in ("renewed-cert.pem", "renewed-key.pem")]

    def put(pair: Pair) -> None:
        for path, new in zip(mine, (pair.cert, pair.key), strict=True):
            path.write_text(Path(new).read_text())

    put(world.client)
    cert, key = map(str, mine)
    settings = at.connection_settings(tls_cert_file=cert, tls_key_file=key)
    async with await Connection.open(settings) as connection:
        put(world.stranger)
        # The same server, which trusts another authority from now on.
        at.config.write_text(other.config.read_text())
        await asyncio.to_thread(at.server.kill)
        await asyncio.to_thread(at.server.start)
        await reconnected(connection)
        assert await ask(connection) == "let in"


def test_private_names_of_nats_py_exist() -> None:
    assert list(inspect.signature(Client._process_info).parameters) == [
        "self",
        "info",
        "initial_connection",
    ]
    assert list(inspect.signature(Client._process_connect_init).parameters) == ["self"]
    reconnect = inspect.getsource(Client._attempt_reconnect)
    assert "await self._process_connect_init()" in reconnect
    assert list(inspect.signature(Client._attempt_reconnect).parameters) == ["self"]
    for beginning in (Client.force_reconnect, Client._process_op_err):
        assert "create_task(self._attempt_reconnect())" in inspect.getsource(beginning)
    assert Client()._server_pool == []
    assert Client()._max_payload == Client().max_payload
    tls = inspect.getsource(TcpTransport.connect_tls)
    assert "self._io_reader, self._io_writer = reader, writer" in tls
    assert list(inspect.signature(Client._select_next_server).parameters) == ["self"]
    assert "await self._select_next_server()" in reconnect
    assert list(inspect.signature(Client._connect_to_server).parameters) == ["self", "s"]
    select = inspect.getsource(Client._select_next_server)
    assert "await self._connect_to_server(s)" in select
    connect = inspect.getsource(TcpTransport.connect)
    assert "self._bare_io_reader = self._io_reader = r" in connect
    assert "self._bare_io_writer = self._io_writer = w" in connect
    assert Client()._host_is_ip("::1")
    websocket = inspect.getsource(WebSocketTransport)
    assert "self._ws = await self._client.ws_connect(" in websocket
    assert {"discovered", "last_attempt", "reconnects", "tls_name"} <= {
        field.name for field in fields(Srv)
    }
    connect = inspect.getsource(Client._process_connect_init)
    greeting = connect.index("await self._process_info(srv_info, initial_connection=True)")
    assert greeting < connect.index('"tls_required" in self._server_info')
    assert greeting < connect.index("self._connect_command()")
    # The JWT and the signature are asked for anew at each connect.
    command = inspect.getsource(Client._connect_command)
    assert "self._signature_cb(" in command
    assert "self._user_jwt_cb()" in command


async def test_websocket_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"aiohttp.*nats-stream-source\[websocket\]"):
        await let_in(ConnectionSettings(servers=("ws://127.0.0.1:1",)))
