"""Wrong credentials, certificates and settings: each is refused, and the error names the reason."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from nats.aio.client import Client

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    AuthorizationError,
    ConfigurationError,
    ConnectError,
    NatsSourceError,
    TlsError,
)
from tests.integration.jetstream.connection import authentication as ways
from tests.integration.jetstream.connection.authentication import (
    MARKS,
    SECRET,
    Way,
    World,
    let_in,
    tls_server,
)
from tests.support.nats.certificates import Pair
from tests.support.nats.jwt_operator import CREDENTIALS, Nkey, Operator

pytestmark = MARKS

Wrong = tuple[Way, Callable[[World], dict[str, Any]], type[NatsSourceError], str]


def _cert(pair: Callable[[World], Pair]) -> Callable[[World], dict[str, Any]]:
    return lambda world: {"tls_cert_file": pair(world).cert, "tls_key_file": pair(world).key}


def _file(option: str, name: str, text: str) -> Callable[[World], dict[str, Any]]:
    return lambda world: {option: world.write(name, text)}


NO_SEED = CREDENTIALS.partition("****")[0].format(jwt="e30.e30.sig")
BAD_SEED = CREDENTIALS.format(jwt="e30.e30.sig", seed="SUXXX")

WRONG: dict[str, Wrong] = {
    "a wrong password": (
        ways.PASSWORD,
        lambda world: {"password": "hunter2"},
        AuthorizationError,
        "refused the credentials: check 'user' and 'password'",
    ),
    "a wrong token": (
        ways.TOKEN,
        lambda world: {"token": "hunter2"},
        AuthorizationError,
        "refused the credentials: check 'token'",
    ),
    "no credentials": (
        ways.PASSWORD,
        lambda world: {"user": None, "password": None},
        AuthorizationError,
        "refused the credentials: none are set.*'credentials', 'nkey_seed_file', 'user'",
    ),
    "an nkey that the server does not know": (
        ways.NKEY,
        lambda world: {"nkey_seed_file": world.write("new.seed", Nkey("USER").seed)},
        AuthorizationError,
        "refused the credentials: check 'nkey_seed_file'",
    ),
    "credentials of another operator": (
        ways.JWT,
        lambda world: {"credentials": world.write("x.creds", Operator().credentials())},
        AuthorizationError,
        "refused the credentials: check 'credentials'",
    ),
    "credentials that have expired": (
        ways.JWT,
        lambda world: {"credentials": world.write("o.creds", world.operator.credentials(lasts=-9))},
        AuthorizationError,
        r"refused the credentials: the user JWT in 'credentials' expired at 20\d\d-",
    ),
    "a token longer than a line": (
        ways.TOKEN,
        lambda world: {"token": "hunter2" * 600},
        ConfigurationError,
        "the CONNECT line, with 'token', is longer than the server's max_control_line",
    ),
    "no credentials file": (
        ways.JWT,
        lambda world: {"credentials": str(world.directory / "none.creds")},
        ConfigurationError,
        r"'credentials': .*none\.creds cannot be read \(No such file.*on every machine",
    ),
    "credentials that are no text": (
        ways.JWT,
        lambda world: {"credentials": _bytes(world, "b.creds", b"\xff\xfe\x80")},
        ConfigurationError,
        "'credentials': .* is not a text file",
    ),
    "credentials without a seed": (
        ways.JWT,
        _file("credentials", "s.creds", NO_SEED),
        ConfigurationError,
        "'credentials': .*s.creds holds no nkey seed",
    ),
    "credentials with a broken seed": (
        ways.JWT,
        _file("credentials", "k.creds", BAD_SEED),
        ConfigurationError,
        "k.creds: its seed is not a user's nkey seed",
    ),
    "content without a seed": (
        ways.JWT,
        lambda world: {"credentials": None, "credentials_content": NO_SEED},
        ConfigurationError,
        "'credentials_content' holds no nkey seed",
    ),
    "an account's seed": (
        ways.NKEY,
        lambda world: {"nkey_seed_file": world.write("a.seed", Nkey("ACCOUNT").seed)},
        ConfigurationError,
        r"a\.seed holds no user's nkey seed",
    ),
    "a server that does not encrypt": (
        ways.PASSWORD,
        lambda world: {"tls_ca_file": world.ca.path},
        TlsError,
        "does not encrypt, and TLS was asked for.*nothing was sent",
    ),
    "an authority that nobody knows": (
        ways.TLS,
        lambda world: {"tls_ca_file": None},
        TlsError,
        "unknown authority .*'tls_ca_file'",
    ),
    "another host's certificate": (
        tls_server(lambda world: world.elsewhere),
        lambda world: {},
        TlsError,
        "certificate is for another host .*'servers'",
    ),
    "a certificate that has expired": (
        tls_server(lambda world: world.expired),
        lambda world: {},
        TlsError,
        "certificate has expired",
    ),
    "no client's certificate": (
        ways.MUTUAL,
        lambda world: {"tls_cert_file": None, "tls_key_file": None},
        TlsError,
        "asks for a client's certificate; set 'tls_cert_file'",
    ),
    "a client's certificate of another authority": (
        ways.MUTUAL,
        _cert(lambda world: world.stranger),
        TlsError,
        "'tls_cert_file'",
    ),
    "a client's certificate that has expired": (
        ways.MUTUAL,
        _cert(lambda world: world.expired_client),
        TlsError,
        "'tls_cert_file'",
    ),
    "a certificate of no user": (
        ways.MAPPED,
        _cert(lambda world: world.server),
        AuthorizationError,
        "none are set beside the certificate in 'tls_cert_file'",
    ),
    "another certificate's key": (
        ways.MUTUAL,
        lambda world: {"tls_key_file": world.server.key},
        ConfigurationError,
        "'tls_cert_file' and 'tls_key_file': .* are not a PEM certificate and its private key",
    ),
    "a key with a passphrase": (
        ways.MUTUAL,
        _cert(lambda world: world.locked),
        ConfigurationError,
        "'tls_key_file': .*locked-key.pem is encrypted",
    ),
    "no file of authorities": (
        ways.TLS,
        lambda world: {"tls_ca_file": str(world.directory / "none.pem")},
        ConfigurationError,
        r"'tls_ca_file': .*none\.pem cannot be read",
    ),
    "authorities that are none": (
        ways.TLS,
        _file("tls_ca_file", "text.pem", "nothing\n"),
        ConfigurationError,
        r"'tls_ca_file': .*text\.pem holds no PEM certificate",
    ),
    "a handshake first that nobody expects": (
        ways.TLS,
        lambda world: {"tls_handshake_first": True, "connect_timeout": 1.0},
        ConnectError,
        # Which one, the greeting decides: it comes before the handshake begins, or into it.
        "leave 'tls_handshake_first' out|'tls_handshake_first' must be left out",
    ),
    "no handshake where the server waits for it": (
        ways.HANDSHAKE_FIRST,
        lambda world: {"tls_handshake_first": False, "connect_timeout": 1.0},
        ConnectError,
        "within 1 s .*'tls_handshake_first' must be set",
    ),
    "wss with another authority": (
        ways.SECURE_WEBSOCKET,
        lambda world: {"tls_ca_file": world.other_ca.path},
        TlsError,
        "unknown authority .*'tls_ca_file'",
    ),
    "wss with the handshake first": (
        ways.SECURE_WEBSOCKET,
        lambda world: {"tls_handshake_first": True},
        ConfigurationError,
        "'tls_handshake_first' is not for wss",
    ),
}


def _bytes(world: World, name: str, data: bytes) -> str:
    (world.directory / name).write_bytes(data)
    return str(world.directory / name)


@pytest.fixture(scope="module")
def servers(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One server for each configuration of the refused clients."""
    started: dict[str, tuple[NatsServer, str]] = {}

    def at(way: Way) -> str:
        key = f"{way.config(world)} {way.websocket}" if way is not ways.JWT else "JWT"
        if key not in started:
            started[key] = way.start(world, tmp_path_factory.mktemp("server") / "server.conf")
        return started[key][1]

    yield at
    for server, _ in started.values():
        server.stop()


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_refusal_names_reason(
    wrong: Wrong, world: World, servers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    way, changed, error, message = wrong
    given = {"connect_timeout": 10.0, **way.client(world), **changed(world)}
    with pytest.raises(error, match=message) as caught:
        await let_in(ConnectionSettings(servers=(servers(way),), **given))
    shown = repr(caught.value)
    for secret in (SECRET, "hunter2", world.nkey.seed, world.content.splitlines()[1]):
        assert secret not in shown + caplog.text


async def test_refused_client_certificate_is_reported_by_first_attempt(
    world: World, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS 1.3 the server's alert can arrive while the client sends CONNECT.

    An attempt whose alert is lost, since the operating system processes a reset first, is repeated.
    """
    alerts, connect = list[BaseException](), Client._process_connect_init

    async def counted(client: Client) -> None:
        try:
            await connect(client)
        except OSError as error:
            reader = client._transport._io_reader
            found = error if isinstance(error, ssl.SSLError) else reader.exception()
            if isinstance(found, ssl.SSLError):
                alerts.append(found)
            raise

    monkeypatch.setattr(Client, "_process_connect_init", counted)
    way, changed, error, message = WRONG["a client's certificate of another authority"]
    given = {"connect_timeout": 10.0, **way.client(world), **changed(world)}
    for number in range(1, 6):
        with pytest.raises(error, match=message):
            await let_in(ConnectionSettings(servers=(servers(way),), **given))
        assert len(alerts) == number
