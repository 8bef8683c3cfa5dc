"""The ways to authenticate and to encrypt, with a server and a client of each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.embedded import NatsServer, free_port
from nats_stream_source.errors import StreamNotFoundError
from nats_stream_source.jetstream.api import JetStream
from tests.support.nats.certificates import Authority, Pair
from tests.support.nats.jwt_operator import Nkey, Operator
from tests.support.wait import wait_until_async

MARKS = [
    pytest.mark.servers,
    # nats-py 2.16 gives aiohttp a number where it wants a ClientWSTimeout by now.
    pytest.mark.filterwarnings("ignore:parameter .timeout. of type:DeprecationWarning"),
]
if sys.version_info < (3, 11):
    # asyncio says so of aiohttp's TLS connection to a server that was killed; 3.11 closes it.
    MARKS.append(
        pytest.mark.filterwarnings("ignore:Exception ignored in. <function _SSLProtocolTransport")
    )

SECRET = "xyzzy-marker"


class World:
    """The files and keys that the tests share."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ca = Authority(directory, "ca")
        self.other_ca = Authority(directory, "other-ca")
        self.server = self.ca.issue("server")
        self.elsewhere = self.ca.issue("elsewhere", ("nats.example.com",))
        self.expired = self.ca.issue("expired", days=-2)
        self.client = self.ca.issue("client", email="spark@example.com")
        self.stranger = self.other_ca.issue("stranger", email="spark@example.com")
        self.expired_client = self.ca.issue("expired-client", days=-2)
        self.locked = self.ca.issue("locked", passphrase=SECRET)
        self.operator = Operator()
        self.nkey = Nkey("USER")
        self.nkey_file = self.write("nkey.seed", f"{self.nkey.seed}\n")
        self.content = self.operator.credentials()
        self.creds = self.write("user.creds", self.content)

    def write(self, name: str, text: str) -> str:
        path = self.directory / name
        path.write_text(text)
        return str(path)

    def tls(self, pair: Pair | None = None, more: str = "") -> str:
        pair = pair or self.server
        return (
            f'tls {{ cert_file: "{pair.cert}", key_file: "{pair.key}", '
            f'ca_file: "{self.ca.path}", {more} }}\n'
        )


class Server(NatsServer):
    """Ready when its log shows it: a server may wait for TLS before it sends INFO."""

    def _accepts_clients(self) -> bool:
        return "Server is ready" in self.log[self._known :]

    def start(self) -> NatsServer:
        self._known = len(self.log)
        return super().start()


@dataclass
class Way:
    """One way to connect: the server's configuration and the client's settings."""

    config: Callable[[World], str]
    client: Callable[[World], dict[str, Any]] = lambda world: {}
    scheme: str = "nats"
    websocket: str | None = None

    def start(self, world: World, config: Path) -> tuple[NatsServer, str]:
        """Start a server of this configuration, written to ``config``; returns its URL too."""
        text, port = self.config(world), None
        if self.websocket is not None:
            port = free_port()
            how = world.tls() if self.websocket == "tls" else self.websocket
            text += f"\nwebsocket {{ listen: '127.0.0.1:{port}', {how} }}\n"
        config.write_text(text)
        server = Server(config=config).start()
        return server, f"{self.scheme}://127.0.0.1:{port or server.port}"


PASSWORD = Way(
    lambda world: f'authorization {{ user: me, password: "{SECRET}" }}',
    lambda world: {"user": "me", "password": SECRET},
)
TOKEN = Way(lambda world: f'authorization {{ token: "{SECRET}" }}', lambda world: {"token": SECRET})
NKEY = Way(
    lambda world: f"authorization {{ users: [ {{ nkey: {world.nkey.public} }} ] }}",
    lambda world: {"nkey_seed_file": world.nkey_file},
)
JWT = Way(lambda world: world.operator.config(), lambda world: {"credentials": world.creds})
TLS = Way(lambda world: world.tls(), lambda world: {"tls_ca_file": world.ca.path}, scheme="tls")
MUTUAL = Way(
    lambda world: world.tls(more="verify: true"),
    lambda world: {
        "tls_ca_file": world.ca.path,
        "tls_cert_file": world.client.cert,
        "tls_key_file": world.client.key,
    },
)
MAPPED = Way(
    lambda world: (
        world.tls(more="verify_and_map: true")
        + "authorization { users: [ { user: spark@example.com } ] }"
    ),
    MUTUAL.client,
)
HANDSHAKE_FIRST = Way(
    lambda world: world.tls(more="handshake_first: true"),
    lambda world: {"tls_ca_file": world.ca.path, "tls_handshake_first": True},
)
WEBSOCKET = Way(PASSWORD.config, PASSWORD.client, "ws", "no_tls: true")
SECURE_WEBSOCKET = Way(
    PASSWORD.config, lambda world: PASSWORD.client(world) | TLS.client(world), "wss", "tls"
)


@dataclass
class Running:
    """A server and the address that a way to connect uses."""

    server: NatsServer
    url: str
    config: Path
    settings: dict[str, Any]

    def connection_settings(self, **more: Any) -> ConnectionSettings:
        given = {"servers": (self.url,), "connect_timeout": 10.0, **self.settings, **more}
        return ConnectionSettings(**given)


async def ask(connection: Connection) -> str:
    """A request that needs an accepted connection: the response is an error of JetStream."""
    try:
        await JetStream(connection).stream_info("none")
    except StreamNotFoundError:
        return "let in"
    raise AssertionError("there is no such stream")


async def reconnected(connection: Connection) -> None:
    await wait_until_async(
        lambda: connection.reconnects and connection.client.is_connected, "a reconnect"
    )


async def let_in(settings: ConnectionSettings) -> str:
    async with await Connection.open(settings) as connection:
        return await ask(connection)


def tls_server(pair: Callable[[World], Pair]) -> Way:
    return Way(lambda world: world.tls(pair(world)), TLS.client, scheme="tls")
