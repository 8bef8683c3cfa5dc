"""The URLs of servers: host names and user information in each form, and announced servers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web

from nats_stream_source.cli.main import main
from nats_stream_source.connection.connection import Connection
from nats_stream_source.connection.settings import (
    ConnectionSettings,
    ServerUrl,
    UserInfo,
    split_list,
)
from nats_stream_source.embedded import NatsServer, free_port
from nats_stream_source.errors import AuthorizationError, ConfigurationError, ConnectError, TlsError
from nats_stream_source.jetstream import connect
from tests.integration.jetstream.connection.authentication import Server, World
from tests.support.event_loop import ThreadServer
from tests.support.wait import wait_until_async

# -- host names ----------------------------------------------------------------------------------

HOSTS = ("LocalHost", "127.0.0.1", "[::1]", "[::1%251]")


async def connects(url: str, **settings: Any) -> None:
    all_settings = ConnectionSettings((url,), **{"connect_timeout": 5} | settings)
    async with await Connection.open(all_settings) as connection:
        assert await connection.alive(5)
        connection.reconnect()
        await connection.wait_connected(10)
        assert await connection.alive(5)


@pytest.fixture(scope="module")
def every_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """The ports of a server without TLS, with TLS after and before INFO, and with websockets."""
    directory = tmp_path_factory.mktemp("urls")
    world = World(directory)
    pair = world.ca.issue("any", ("localhost", "127.0.0.1", "::1"))
    ports = {"ca": world.ca.path, "pair": pair, "ws": free_port(), "wss": free_port()}
    configs = {
        "nats": f"websocket {{ host: '::', port: {ports['ws']}, no_tls: true }}",
        "tls": world.tls(pair)
        + f"websocket {{ host: '::', port: {ports['wss']}, {world.tls(pair)} }}",
        "first": world.tls(pair, "handshake_first: true"),
    }
    with contextlib.ExitStack() as stack:
        for name, text in configs.items():
            config = directory / f"{name}.conf"
            config.write_text(text)
            server = stack.enter_context(Server(config=config, args=("-a", "::")))
            ports[name] = server.port
        yield ports


@pytest.mark.parametrize(
    ("scheme", "host"),
    [
        (scheme, host)
        for scheme in ("nats", "TLS", "first", "Ws", "wss")
        for host in HOSTS
        if (scheme, host) != ("wss", "[::1%251]")  # no certificate has a zone: nats.go fails too
    ],
)
@pytest.mark.filterwarnings("ignore:parameter .timeout. of type:DeprecationWarning")
async def test_host_name(every_address: dict[str, Any], scheme: str, host: str) -> None:
    port = every_address[scheme.lower()]
    settings: dict[str, Any] = {}
    if scheme.lower() in ("tls", "first", "wss"):
        settings["tls_ca_file"] = every_address["ca"]
    if scheme == "first":
        settings["tls_handshake_first"], scheme = True, "tls"
    await connects(f"{scheme}://{host}:{port}", **settings)


async def test_scheme_in_upper_case_requires_tls(every_address: dict[str, Any]) -> None:
    with pytest.raises(TlsError, match="does not encrypt"):
        await connects(f"TLS://localhost:{every_address['nats']}")


@pytest.mark.parametrize(
    ("url", "expected"),
    {
        "h": "nats://h:4222",
        "h:1": "nats://h:1",
        " nats://h ": "nats://h:4222",
        "nats://h/": "nats://h:4222",
        "nats://h?a=b": "nats://h:4222",
        "nats://h:": "nats://h:4222",
        "tls://A.b.": "tls://a.b.:4222",
        "tls://localhost.": "tls://localhost:4222",
        "nats://[FE80::1%25Eth0]": "nats://[fe80::1%Eth0]:4222",
        "nats://xn--fa-hia.de": "nats://xn--fa-hia.de:4222",
        "nats://ß:ς@h": "nats://h:4222",
        "nats://my_host": "nats://my_host:4222",
        "ws://h": "ws://h",
        "wss://h/path?a=b": "wss://h/path?a=b",
        "ws://h/ß": "ws://h/ß",
        "ws://u:p@h/x@y": "ws://h/x@y",
    }.items(),
)
def test_url_parsed(url: str, expected: str) -> None:
    assert str(ServerUrl.parse(url)) == expected


@pytest.mark.parametrize(
    "url",
    [
        "", "nats://", "nats://:1", "nats://h:0", "nats://h:x", "nats://a..b", "http://h", "::1",
        "u:secret@nats://h", "nats://u:secret", "u:secret", "ws://u:secret/@h",
        "h1,h2", "nats://u:secret@h1,nats://u:secret@h2", "u:secret@h1,u:secret@h2",
    ],
)  # fmt: skip
def test_url_invalid(url: str) -> None:
    problem = "contains a comma; give each server" if "," in url else "is not an address like"
    with pytest.raises(ConfigurationError, match=problem) as caught:
        ServerUrl.parse(url)
    assert "secret" not in str(caught.value)


def test_list_of_urls() -> None:
    assert split_list("nats://a, b:1,,") == ("nats://a", "b:1")
    assert split_list("nats://u:p@a,t@b") == ("nats://u:p@a", "t@b")
    with pytest.raises(ConfigurationError, match="write a comma of a password as %2C") as caught:
        split_list("nats://u:secret,word@h")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("host", ["faß.de", "b%C3%BCcher.example", "a\u200db.de"])
def test_host_name_not_ascii(host: str) -> None:
    with pytest.raises(ConfigurationError, match="is not ASCII; write it in its xn-- form"):
        ServerUrl.parse(f"nats://u:ß@{host}")


# -- user information ----------------------------------------------------------------------------

SECRETS = ("p@ss:w/rd?#%", "ü 100%25+&=", "$word", " x ", " ")


@pytest.mark.parametrize(
    ("text", "expected"),
    {
        "me:secret": UserInfo("me", "secret"),
        "m%40e:p%3A%2F%25": UserInfo("m@e", "p:/%"),
        "me:a:b": UserInfo("me", "a:b"),
        "me:a%2Cb": UserInfo("me", "a,b"),
        "me:": UserInfo("me", ""),
        "t%6Fken": UserInfo(token="token"),
        "t+ken": UserInfo(token="t+ken"),
    }.items(),
)
def test_user_information(text: str, expected: UserInfo) -> None:
    assert ServerUrl.parse(f"nats://{text}@h").user_info == expected
    assert "@" not in str(ServerUrl.parse(f"nats://{text}@h"))


@pytest.mark.parametrize(
    ("kind", "secret"), [*itertools.product(("user", "token"), SECRETS), ("user", "")]
)
async def test_user_information_encoded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    secret: str,
) -> None:
    """In the layer, in a list, in a variable and in a context, as curl and Go encode it."""
    config = tmp_path / "auth.conf"
    fields = {"token": secret} if kind == "token" else {"user": f"u:{secret}", "password": secret}
    config.write_text(f"authorization {json.dumps(fields, ensure_ascii=False)}\n")
    encoded = quote(secret, safe="")
    user_info = encoded if kind == "token" else f"{quote(f'u:{secret}', safe='')}:{encoded}"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with NatsServer(config=config) as server:
        url = server.url.replace("//", f"//{user_info}@")
        dead = f"nats://{user_info}@127.0.0.1:{free_port()}"
        await connects(url)
        await (await Connection.open(ConnectionSettings((dead, url)))).close()
        async with connect(f"{dead}, {url}") as jetstream:
            assert await jetstream.connection.alive(5)
        with pytest.raises(AuthorizationError) as caught:
            await connects(url.replace(f"{user_info}@", f"{user_info}x@"))
        assert (secret.strip() or user_info) not in str(caught.value)
        monkeypatch.setenv("NATS_URL", f"{dead},{url}")
        assert await asyncio.to_thread(main, ["peek", "none"]) == 2
        assert "bucket 'none' does not exist" in capsys.readouterr().err
        monkeypatch.delenv("NATS_URL")
        contexts = tmp_path / "nats" / "context"
        contexts.mkdir(parents=True)
        (contexts / "c.json").write_text(f'{{"url": "{url}"}}')
        assert await asyncio.to_thread(main, ["peek", "none", "--context", "c"]) == 2
        assert "bucket 'none' does not exist" in capsys.readouterr().err


# -- servers that hang ---------------------------------------------------------------------------


class Mute(ThreadServer):
    """Accepts clients and sends nothing."""

    accepted = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        await reader.read()


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients try their servers in the given order."""
    monkeypatch.setattr("nats.aio.client.shuffle", lambda servers: None)


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("scheme", ["nats", "ws", "wss"])
@pytest.mark.filterwarnings("ignore:parameter .timeout. of type:DeprecationWarning")
async def test_configured_server_hangs(every_address: dict[str, Any], scheme: str) -> None:
    """It has its share of the time only."""
    with Mute() as mute:
        servers = tuple(
            f"{scheme}://localhost:{port}" for port in (mute.port, every_address[scheme])
        )
        ca = every_address["ca"] if scheme == "wss" else None
        settings = ConnectionSettings(servers, connect_timeout=8, tls_ca_file=ca)
        await (await Connection.open(settings)).close()
        assert mute.accepted == 1


@contextlib.contextmanager
def full(host: str, port: int) -> Iterator[None]:
    """A listener that drops further SYNs, since its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(3):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex((host, port))
        yield


@pytest.mark.parametrize("first", [full, Mute])
@pytest.mark.parametrize("handshake_first", [False, True])
async def test_first_address_of_name_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Any, handshake_first: bool
) -> None:
    resolve = socket.getaddrinfo

    def two_addresses(host: str, *args: Any, **options: Any) -> list[Any]:
        names = ["127.0.0.2", "127.0.0.1"] if host == "localhost" else [host]
        return [each for name in names for each in resolve(name, *args, **options)]

    monkeypatch.setattr("socket.getaddrinfo", two_addresses)
    world = World(tmp_path)
    config = tmp_path / "tls.conf"
    config.write_text(world.tls(more=f"handshake_first: {json.dumps(handshake_first)}"))
    with Server(config=config, port=free_port()) as server, first("127.0.0.2", server.port):
        settings = {"tls_ca_file": world.ca.path, "tls_handshake_first": handshake_first}
        await connects(f"tls://localhost:{server.port}", connect_timeout=8, **settings)


async def test_addresses_of_name_refuse() -> None:
    with pytest.raises(ConnectError, match="connection refused"):
        await connects(f"nats://localhost:{free_port()}", connect_timeout=1)


@pytest.mark.filterwarnings("ignore:parameter .timeout. of type:DeprecationWarning")
async def test_websocket_hangs() -> None:
    with Mute() as mute, pytest.raises(ConnectError, match=r"no response$"):
        await connects(f"ws://127.0.0.1:{mute.port}", connect_timeout=1)


@pytest.mark.usefixtures("in_order")
@pytest.mark.filterwarnings("ignore:parameter .timeout. of type:DeprecationWarning")
@pytest.mark.parametrize("scheme", ["ws", "wss"])
async def test_websocket_hangs_after_upgrade(every_address: dict[str, Any], scheme: str) -> None:
    """At the first connect and at a reconnect."""
    upgraded = 0

    async def upgrade(request: web.Request) -> web.WebSocketResponse:
        nonlocal upgraded
        upgraded += 1
        websocket = web.WebSocketResponse()
        await websocket.prepare(request)
        await websocket.receive()
        return websocket

    application, port = web.Application(), free_port()
    application.router.add_get("/", upgrade)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    settings: dict[str, Any] = {"connect_timeout": 8}
    context = None
    if scheme == "wss":
        settings["tls_ca_file"] = every_address["ca"]
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(every_address["pair"].cert, every_address["pair"].key)
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
        servers = tuple(f"{scheme}://127.0.0.1:{each}" for each in (port, every_address[scheme]))
        async with await Connection.open(ConnectionSettings(servers, **settings)) as connection:
            assert upgraded == 1
            connection.client._server_pool.sort(key=lambda server: server.uri.port != port)
            connection.reconnect()
            await connection.wait_connected(8)
            assert await connection.alive(5)
            assert upgraded == 2
    finally:
        await runner.cleanup()


# -- announced servers ---------------------------------------------------------------------------


def node(tmp_path: Path, name: str, port: int, routes: list[int], text: str = "") -> NatsServer:
    """A member of a cluster with user information; its own route is the first."""
    urls = ", ".join(f'"nats://127.0.0.1:{route}"' for route in routes)
    config = tmp_path / f"{name}.conf"
    config.write_text(
        f"server_name: {name}\n"
        f'authorization {{ user: "m@e", password: "p%/" }}\n{text}\n'
        f"cluster {{ name: c, listen: '127.0.0.1:{routes[0]}', routes: [{urls}] }}\n"
    )
    return NatsServer(config=config, port=port)


async def announced(connection: Connection, count: int) -> None:
    await wait_until_async(
        lambda: sum(server.discovered for server in connection.client._server_pool) >= count,
        f"{count} announced servers",
    )


@pytest.mark.parametrize("scheme", ["nats", "ws", "wss"])
@pytest.mark.filterwarnings("ignore:parameter .timeout. of type:DeprecationWarning")
async def test_user_information_serves_announced_servers(tmp_path: Path, scheme: str) -> None:
    """Their scheme is that of the server that announced them."""
    world = World(tmp_path) if scheme == "wss" else None
    routes, ports = [free_port(), free_port()], [free_port(), free_port()]
    nats_ports = ports if scheme == "nats" else [free_port(), free_port()]
    tls = world.tls() if world else "no_tls: true"
    websockets = [
        "" if scheme == "nats" else f"websocket {{ listen: '127.0.0.1:{port}', {tls} }}"
        for port in ports
    ]
    first = node(tmp_path, "a", nats_ports[0], routes, websockets[0])
    with node(tmp_path, "b", nats_ports[1], routes[::-1], websockets[1]), first:
        url = f"{scheme}://m%40e:p%25%2F@127.0.0.1:{ports[0]}"
        settings = ConnectionSettings((url,), tls_ca_file=world.ca.path if world else None)
        async with await Connection.open(settings) as connection:
            await announced(connection, 1)
            first.stop()
            await wait_until_async(lambda: connection.reconnects == 1, "connected to b")
            assert await connection.alive(5)
            assert connection.client.connected_url is not None
            assert connection.client.connected_url.geturl() == f"{scheme}://127.0.0.1:{ports[1]}"


async def test_announced_servers_hang(tmp_path: Path) -> None:
    """The configured server is tried before each of them."""
    with contextlib.ExitStack() as stack:
        mutes = [stack.enter_context(Mute()) for _ in range(4)]
        routes = [free_port() for _ in range(5)]
        for index, mute in enumerate(mutes):
            own = [routes[index + 1], *routes]
            text = f"client_advertise: '127.0.0.1:{mute.port}'"
            stack.enter_context(node(tmp_path, f"m{index}", free_port(), own, text))
        server = stack.enter_context(node(tmp_path, "a", free_port(), routes))
        url = server.url.replace("//", "//m%40e:p%25%2F@")
        settings = ConnectionSettings((url,), connect_timeout=60)
        async with await Connection.open(settings) as connection:
            await announced(connection, 4)
            for count in range(1, 6):
                connection.reconnect()
                await connection.wait_connected(20)
                assert connection.reconnects == count
            assert [mute.accepted for mute in mutes] == [0] * 4
            server.stop()
            await wait_until_async(lambda: sum(mute.accepted for mute in mutes) > 0, "a mute one")
            server.start()
            await connection.wait_connected(50)
            assert sum(mute.accepted for mute in mutes) == 1
