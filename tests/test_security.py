"""Every way to authenticate and to encrypt, against a real server; and every way it goes wrong."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority, Pair
from nats.aio.client import Client
from operators import CREDENTIALS, Nkey, Operator

from nats_stream_source.embedded import NatsServer, free_port
from nats_stream_source.errors import (
    AuthorizationError,
    ConfigurationError,
    ConnectError,
    NatsSourceError,
    StreamNotFoundError,
    TlsError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.connection import Connection, ConnectionSettings

pytestmark = [
    pytest.mark.servers,
    # nats-py 2.16 gives aiohttp a number where it wants a ClientWSTimeout by now.
    pytest.mark.filterwarnings("ignore:parameter .timeout. of type:DeprecationWarning"),
]
if sys.version_info < (3, 11):
    # asyncio says so of aiohttp's TLS connection to a server that was killed; 3.11 closes it.
    pytestmark.append(
        pytest.mark.filterwarnings("ignore:Exception ignored in. <function _SSLProtocolTransport")
    )

SECRET = "xyzzy-marker"
BCRYPTED = "$2a$04$abcdefghijklmnopqrstuu3PNhI/ZSYGV0pLwWtSKzddFYrN0pDoC"  # of "marker"


class World:
    """The files and keys that the tests of this module share."""

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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


class Server(NatsServer):
    """Ready when its log says so: a server may wait for TLS before it greets anybody."""

    def _greets(self) -> bool:
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

WAYS = {
    "user and password": PASSWORD,
    "user and bcrypted password": Way(
        lambda world: f'authorization {{ user: me, password: "{BCRYPTED}" }}',
        lambda world: {"user": "me", "password": "marker"},
    ),
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


@dataclass
class Running:
    """A server and the address that a way to connect uses."""

    server: NatsServer
    url: str
    config: Path
    config_text: str
    settings: dict[str, Any]

    def connection_settings(self, **more: Any) -> ConnectionSettings:
        given = {"servers": (self.url,), "connect_timeout": 10.0, **self.settings, **more}
        return ConnectionSettings(**given)


@pytest.fixture
def running(world: World, tmp_path: Path) -> Iterator[Callable[[Way], Running]]:
    started: list[NatsServer] = []

    def start(way: Way) -> Running:
        text, port = way.config(world), None
        if way.websocket is not None:
            port = free_port()
            how = world.tls() if way.websocket == "tls" else way.websocket
            text += f"\nwebsocket {{ listen: '127.0.0.1:{port}', {how} }}\n"
        config = tmp_path / f"{len(started)}.conf"
        config.write_text(text)
        server = Server(config=config)
        started.append(server)
        server.start()
        url = f"{way.scheme}://127.0.0.1:{port or server.port}"
        return Running(server, url, config, text, way.client(world))

    yield start
    for server in started:
        server.stop()


async def ask(connection: Connection) -> str:
    """Whatever needs a connection that is let in: the answer is an error of JetStream's own."""
    try:
        await JetStream(connection).stream_info("none")
    except StreamNotFoundError:
        return "let in"
    raise AssertionError("there is no such stream")


async def until(holds: Callable[[], object]) -> None:
    """Wait until ``holds()``, for at most ten seconds."""
    deadline = asyncio.get_running_loop().time() + 10
    while not holds():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


async def reconnected(connection: Connection) -> None:
    await until(lambda: connection.reconnects and connection.client.is_connected)


def let_in(settings: ConnectionSettings) -> str:
    async def work() -> str:
        connection = await Connection.open(settings)
        try:
            return await ask(connection)
        finally:
            await connection.close()

    return asyncio.run(work())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_let_in_and_again_after_a_restart(way: Way, running: Callable[[Way], Running]) -> None:
    at = running(way)

    async def work() -> tuple[str, str]:
        connection = await Connection.open(at.connection_settings())
        try:
            first = await ask(connection)
            await asyncio.to_thread(at.server.kill)
            await asyncio.to_thread(at.server.start)
            await reconnected(connection)
            return first, await ask(connection)
        finally:
            await connection.close()

    assert asyncio.run(work()) == ("let in", "let in")


def test_encryption_is_real(running: Callable[[Way], Running]) -> None:
    """A server that leaves TLS to the client gets it when it was asked for, and only then."""
    at = running(WAYS["TLS, left to the client"])

    async def work(settings: ConnectionSettings) -> bool:
        connection = await Connection.open(settings)
        try:
            transport = connection.client._transport
            assert transport is not None
            return transport._io_writer.get_extra_info("cipher") is not None  # type: ignore[attr-defined]
        finally:
            await connection.close()

    assert asyncio.run(work(at.connection_settings()))
    assert not asyncio.run(work(ConnectionSettings(servers=(at.server.url,))))


def test_a_renewed_file_counts_at_the_next_reconnect(
    world: World, running: Callable[[Way], Running]
) -> None:
    """Also where the file was missing or half written in between: nats-py must not give up."""
    at = running(JWT)
    path = world.write("renewed.creds", world.operator.credentials())
    write = Path(path).write_text
    seen: list[Exception] = []

    async def work() -> str:
        connection = await Connection.open(at.connection_settings(credentials=path))
        judge = connection._judge

        def judging(error: Exception, text: str) -> NatsSourceError | None:
            if (verdict := judge(error, text)) is not None:
                seen.append(verdict)
            return verdict

        connection._judge = judging  # type: ignore[method-assign]
        try:
            write("")
            await asyncio.to_thread(at.server.kill)
            await asyncio.to_thread(at.server.start)
            await until(lambda: seen)
            write(world.operator.credentials())
            await reconnected(connection)
            return await ask(connection)
        finally:
            await connection.close()

    assert asyncio.run(work()) == "let in"
    assert isinstance(seen[0], ConfigurationError)


def test_a_renewed_client_certificate_counts_at_the_next_reconnect(
    world: World, running: Callable[[Way], Running]
) -> None:
    at = running(MUTUAL)
    other = running(
        Way(lambda world: MUTUAL.config(world).replace(world.ca.path, world.other_ca.path))
    )
    mine = [Path(world.write(name, "")) for name in ("renewed-cert.pem", "renewed-key.pem")]

    def put(pair: Pair) -> None:
        for path, new in zip(mine, (pair.cert, pair.key), strict=True):
            path.write_text(Path(new).read_text())

    async def work() -> str:
        put(world.client)
        cert, key = map(str, mine)
        connection = await Connection.open(
            at.connection_settings(tls_cert_file=cert, tls_key_file=key)
        )
        try:
            put(world.stranger)
            # The same server, which trusts another authority from now on.
            at.config.write_text(other.config_text)
            await asyncio.to_thread(at.server.kill)
            await asyncio.to_thread(at.server.start)
            await reconnected(connection)
            return await ask(connection)
        finally:
            await connection.close()

    assert asyncio.run(work()) == "let in"


def test_one_of_two_servers_is_trusted(world: World, running: Callable[[Way], Running]) -> None:
    good, bad = running(TLS), running(_tls_server(lambda world: world.expired))
    for urls in ((bad.url, good.url), (good.url, bad.url)):
        assert let_in(good.connection_settings(servers=urls)) == "let in"
    with pytest.raises(TlsError, match="has expired"):
        let_in(good.connection_settings(servers=(bad.url, bad.url), connect_timeout=1.0))


def test_nothing_is_sent_to_a_server_that_does_not_encrypt() -> None:
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
            let_in(ConnectionSettings(servers=(url,), user="me", password=SECRET))
        thread.join(10)
    assert got == [b""]


def test_the_private_names_of_nats_py_are_as_they_are_needed() -> None:
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
    connect = inspect.getsource(Client._process_connect_init)
    greeting = connect.index("await self._process_info(srv_info, initial_connection=True)")
    assert greeting < connect.index('"tls_required" in self._server_info')
    assert greeting < connect.index("self._connect_command()")
    # The JWT and the signature are asked for anew at each connect.
    command = inspect.getsource(Client._connect_command)
    assert "self._signature_cb(" in command
    assert "self._user_jwt_cb()" in command


def test_websocket_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"aiohttp.*nats-stream-source\[websocket\]"):
        let_in(ConnectionSettings(servers=("ws://127.0.0.1:1",)))


@pytest.mark.parametrize("option", ["credentials", "nkey_seed_file"])
def test_nkeys_without_its_package(
    option: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nkeys", None)
    given = {"credentials": world.creds, "nkey_seed_file": world.nkey_file}[option]
    with pytest.raises(ConfigurationError, match=r"nkeys, .*pip install 'nats-py\[nkeys\]'"):
        let_in(ConnectionSettings(servers=("127.0.0.1:1",), **{option: given}))


# -- what goes wrong -------------------------------------------------------------------------------

Wrong = tuple[Way, Callable[[World], dict[str, Any]], type[NatsSourceError], str]


def _tls_server(pair: Callable[[World], Pair]) -> Way:
    return Way(lambda world: world.tls(pair(world)), TLS.client, scheme="tls")


def _cert(pair: Callable[[World], Pair]) -> Callable[[World], dict[str, Any]]:
    return lambda world: {"tls_cert_file": pair(world).cert, "tls_key_file": pair(world).key}


def _file(option: str, name: str, text: str) -> Callable[[World], dict[str, Any]]:
    return lambda world: {option: world.write(name, text)}


NO_JWT = CREDENTIALS.replace("NATS USER JWT", "SOMETHING ELSE").format(jwt="x", seed="SUAX")
NO_SEED = CREDENTIALS.partition("****")[0].format(jwt="e30.e30.sig")
BAD_SEED = CREDENTIALS.format(jwt="e30.e30.sig", seed="SUXXX")

WRONG: dict[str, Wrong] = {
    "a wrong password": (
        PASSWORD,
        lambda world: {"password": "hunter2"},
        AuthorizationError,
        "refused the credentials: check the options 'user' and 'password'",
    ),
    "a wrong token": (
        TOKEN,
        lambda world: {"token": "hunter2"},
        AuthorizationError,
        "refused the credentials: check the option 'token'",
    ),
    "no credentials": (
        PASSWORD,
        lambda world: {"user": None, "password": None},
        AuthorizationError,
        "refused the credentials: none are set.*'credentials', 'nkeySeedFile', 'user'",
    ),
    "an nkey that the server does not know": (
        NKEY,
        lambda world: {"nkey_seed_file": world.write("new.seed", Nkey("USER").seed)},
        AuthorizationError,
        "refused the credentials: check the option 'nkeySeedFile'",
    ),
    "an nkey where the server wants none": (
        PASSWORD,
        lambda world: {"user": None, "password": None, "nkey_seed_file": world.nkey_file},
        AuthorizationError,
        "refused the credentials: check the option 'nkeySeedFile'",
    ),
    "credentials of another operator": (
        JWT,
        lambda world: {"credentials": world.write("x.creds", Operator().credentials())},
        AuthorizationError,
        "refused the credentials: check the option 'credentials'",
    ),
    "credentials that have expired": (
        JWT,
        lambda world: {"credentials": world.write("o.creds", world.operator.credentials(lasts=-9))},
        AuthorizationError,
        r"refused the credentials: the user JWT in the option 'credentials' expired at 20\d\d-",
    ),
    "no credentials file": (
        JWT,
        lambda world: {"credentials": str(world.directory / "none.creds")},
        ConfigurationError,
        r"'credentials': .*none\.creds cannot be read \(No such file.*on every machine",
    ),
    "credentials that cannot be read": (
        JWT,
        lambda world: {"credentials": str(world.directory)},
        ConfigurationError,
        "'credentials': .* cannot be read",
    ),
    "credentials that are no text": (
        JWT,
        lambda world: {"credentials": _bytes(world, "b.creds", b"\xff\xfe\x80")},
        ConfigurationError,
        "'credentials': .* is not a text file",
    ),
    "credentials without a JWT": (
        JWT,
        _file("credentials", "j.creds", NO_JWT),
        ConfigurationError,
        "'credentials': .*j.creds holds no user JWT: it must be a whole",
    ),
    "credentials without a seed": (
        JWT,
        _file("credentials", "s.creds", NO_SEED),
        ConfigurationError,
        "'credentials': .*s.creds holds no nkey seed",
    ),
    "an empty credentials file": (
        JWT,
        _file("credentials", "e.creds", ""),
        ConfigurationError,
        "holds no user JWT and no nkey seed",
    ),
    "credentials with a broken seed": (
        JWT,
        _file("credentials", "k.creds", BAD_SEED),
        ConfigurationError,
        "k.creds: its seed is not a user's nkey seed",
    ),
    "content without a seed": (
        JWT,
        lambda world: {"credentials": None, "credentials_content": NO_SEED},
        ConfigurationError,
        "option 'credentialsContent' holds no nkey seed",
    ),
    "no seed file": (
        NKEY,
        lambda world: {"nkey_seed_file": str(world.directory / "none.seed")},
        ConfigurationError,
        r"'nkeySeedFile': .*none\.seed cannot be read",
    ),
    "a seed file without a seed": (
        NKEY,
        _file("nkey_seed_file", "no.seed", "hunter2\n"),
        ConfigurationError,
        r"'nkeySeedFile': .*no\.seed holds no user's nkey seed",
    ),
    "an account's seed": (
        NKEY,
        lambda world: {"nkey_seed_file": world.write("a.seed", Nkey("ACCOUNT").seed)},
        ConfigurationError,
        r"a\.seed holds no user's nkey seed",
    ),
    "a seed cut short": (
        NKEY,
        lambda world: {"nkey_seed_file": world.write("c.seed", world.nkey.seed[:20])},
        ConfigurationError,
        "its seed is not a user's nkey seed",
    ),
    "two ways at once": (
        PASSWORD,
        lambda world: {"credentials": world.creds},
        ConfigurationError,
        "'credentials' and 'user' exclude each other",
    ),
    "a server that does not encrypt": (
        PASSWORD,
        lambda world: {"tls_ca_file": world.ca.path},
        TlsError,
        "does not encrypt, and TLS was asked for.*nothing was sent",
    ),
    "an authority that nobody knows": (
        TLS,
        lambda world: {"tls_ca_file": None},
        TlsError,
        "unknown authority .*option 'tlsCaFile'",
    ),
    "another authority": (
        TLS,
        lambda world: {"tls_ca_file": world.other_ca.path},
        TlsError,
        "unknown authority .*option 'tlsCaFile'",
    ),
    "another host's certificate": (
        _tls_server(lambda world: world.elsewhere),
        lambda world: {},
        TlsError,
        "certificate is for another host .*option 'servers'",
    ),
    "a certificate that has expired": (
        _tls_server(lambda world: world.expired),
        lambda world: {},
        TlsError,
        "certificate has expired",
    ),
    "an expired certificate, handshake first": (
        Way(
            lambda world: world.tls(world.expired, "handshake_first: true"),
            HANDSHAKE_FIRST.client,
        ),
        lambda world: {},
        TlsError,
        "certificate has expired",
    ),
    "no client's certificate": (
        MUTUAL,
        lambda world: {"tls_cert_file": None, "tls_key_file": None},
        TlsError,
        "asks for a client's certificate: set the options 'tlsCertFile'",
    ),
    "a client's certificate of another authority": (
        MUTUAL,
        _cert(lambda world: world.stranger),
        TlsError,
        "'tlsCertFile'",
    ),
    "a client's certificate that has expired": (
        MUTUAL,
        _cert(lambda world: world.expired_client),
        TlsError,
        "'tlsCertFile'",
    ),
    "a certificate of no user": (
        MAPPED,
        _cert(lambda world: world.server),
        AuthorizationError,
        "none are set beside the certificate in 'tlsCertFile'",
    ),
    "a key without a certificate": (
        MUTUAL,
        lambda world: {"tls_cert_file": None},
        ConfigurationError,
        "'tlsCertFile' and 'tlsKeyFile' belong together",
    ),
    "another certificate's key": (
        MUTUAL,
        lambda world: {"tls_key_file": world.server.key},
        ConfigurationError,
        "'tlsCertFile' and 'tlsKeyFile': .* are not a PEM certificate and its private key",
    ),
    "a key with a passphrase": (
        MUTUAL,
        _cert(lambda world: world.locked),
        ConfigurationError,
        "'tlsKeyFile': .*locked-key.pem is encrypted",
    ),
    "no key file": (
        MUTUAL,
        lambda world: {"tls_key_file": str(world.directory / "none.pem")},
        ConfigurationError,
        r"'tlsKeyFile': .*none\.pem cannot be read",
    ),
    "no file of authorities": (
        TLS,
        lambda world: {"tls_ca_file": str(world.directory / "none.pem")},
        ConfigurationError,
        r"'tlsCaFile': .*none\.pem cannot be read",
    ),
    "authorities that are none": (
        TLS,
        _file("tls_ca_file", "text.pem", "nothing\n"),
        ConfigurationError,
        r"'tlsCaFile': .*text\.pem holds no PEM certificate",
    ),
    "a handshake first that nobody expects": (
        TLS,
        lambda world: {"tls_handshake_first": True, "connect_timeout": 1.0},
        ConnectError,
        # Which one, the greeting decides: it comes before the handshake begins, or into it.
        "leave the option 'tlsHandshakeFirst' out|'tlsHandshakeFirst' must be left out",
    ),
    "no handshake where the server waits for it": (
        HANDSHAKE_FIRST,
        lambda world: {"tls_handshake_first": False, "connect_timeout": 1.0},
        ConnectError,
        "within 1 s .*'tlsHandshakeFirst' must be set",
    ),
    "wss with another authority": (
        SECURE_WEBSOCKET,
        lambda world: {"tls_ca_file": world.other_ca.path},
        TlsError,
        "unknown authority .*option 'tlsCaFile'",
    ),
    "ws with options of TLS": (
        WEBSOCKET,
        lambda world: {"tls_ca_file": world.ca.path},
        ConfigurationError,
        "'tlsCaFile' asks for TLS, and a ws:// address has none",
    ),
    "wss with the handshake first": (
        SECURE_WEBSOCKET,
        lambda world: {"tls_handshake_first": True},
        ConfigurationError,
        "'tlsHandshakeFirst' is not for wss",
    ),
}


def _bytes(world: World, name: str, data: bytes) -> str:
    (world.directory / name).write_bytes(data)
    return str(world.directory / name)


@pytest.fixture(scope="module")
def servers(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One server for each different configuration that the wrong clients meet."""
    started: dict[str, tuple[NatsServer, int | None]] = {}

    def at(way: Way) -> str:
        key = f"{way.config(world)} {way.websocket}" if way is not JWT else "JWT"
        if key not in started:
            text, port = way.config(world), None
            if way.websocket is not None:
                port = free_port()
                how = world.tls() if way.websocket == "tls" else way.websocket
                text += f"\nwebsocket {{ listen: '127.0.0.1:{port}', {how} }}\n"
            config = tmp_path_factory.mktemp("server") / "server.conf"
            config.write_text(text)
            started[key] = Server(config=config), port
            started[key][0].start()
        server, port = started[key]
        return f"{way.scheme}://127.0.0.1:{port or server.port}"

    yield at
    for server, _ in started.values():
        server.stop()


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_refused_with_the_reason(
    wrong: Wrong, world: World, servers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    way, changed, error, message = wrong
    given = {"connect_timeout": 10.0, **way.client(world), **changed(world)}
    with pytest.raises(error, match=message) as caught:
        let_in(ConnectionSettings(servers=(servers(way),), **given))
    shown = repr(caught.value)
    for secret in (SECRET, "hunter2", world.nkey.seed, world.content.splitlines()[1]):
        assert secret not in shown + caplog.text
