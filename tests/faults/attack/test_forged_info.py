"""Forged INFO: the greeting of a malicious server, and what the client sends afterwards.

Without TLS the client accepts any server at the address and sends it the credentials. Failures are
a hang, an error without a name, memory without bound, and a secret that is shown to the user or,
where the options require TLS, sent to another server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from pathlib import Path

import pytest

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import NatsSourceError
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.retry import retry_transient
from tests.support.attack_target import PATIENCE, deadline, peak, read
from tests.support.event_loop import ThreadServer, until_one_ends
from tests.support.nats.certificates import Authority, Pair
from tests.support.nats.rogue_server import Rogue, greeting, message
from tests.support.proxy.fault_proxy import Proxy
from tests.support.wait import wait_until

SECRET = "xyzzy-marker"
WHO = {"user": "me", "password": SECRET}

GREETINGS: dict[str, bytes] = {
    "nothing": b"",
    "not NATS": b"HTTP/1.1 200 OK\r\n\r\n",
    "no JSON": b"INFO {\r\n",
    "a number": b"INFO 5\r\n",
    "a list": b"INFO []\r\n",
    "null": b"INFO null\r\n",
    "bytes": b"INFO \xff\xfe\r\n",
    "nested": b"INFO " + b"[" * 20_000 + b"\r\n",
    "longer than a line may be": b"INFO {" + b" " * (1 << 20) + b"}\r\n",
    "no end": b"INFO " + b"x" * 40_000,
    "an error": b"-ERR 'no'\r\n",
    "half": b'INFO {"server_id"',
    "max_payload is a text": greeting(max_payload="large"),
    "max_payload is 0": greeting(max_payload=0),
    "max_payload is negative": greeting(max_payload=-1),
    "the nonce is a number": greeting(nonce=5, auth_required=True),
    "the version is a list": greeting(version=[]),
    "auth_required is a text": greeting(auth_required="yes"),
    "connect_urls is a number": greeting(connect_urls=5),
    "connect_urls are no addresses": greeting(
        connect_urls=[5, None, "", ":", "x", "[::1", "a@b:1", "h:99999", "h:0", "\u0000:1", " :1"]
    ),
    "TLS required": greeting(tls_required=True),
    "no headers": greeting(headers=False),
    "nobody answers": greeting(),
}


@pytest.mark.parametrize("name", GREETINGS)
def test_greetings(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A server of which nothing but the greeting comes."""
    with caplog.at_level(logging.DEBUG), Rogue(GREETINGS[name]) as rogue:
        with pytest.raises(NatsSourceError) as caught:
            read(rogue.url, bucket="b", connectTimeout=0.25, requestTimeout=0.25, **WHO)
        # The kernel has taken the client in; the server's own thread may come to it later.
        wait_until(lambda: rogue.received, "somebody came", deadline=600)
    assert SECRET not in caplog.text + str(caught.value) + repr(caught.value)


AFTERWARDS: dict[str, bytes] = {
    "no frame": b"hello\r\n",
    "INFO without JSON": b"INFO {]\r\n",
    "INFO nested": b"INFO " + b'{"a":' * 50_000 + b"\r\n",
    "INFO is a list": b"INFO []\r\n",
    "INFO, connect_urls is a number": greeting(connect_urls=5),
    "a status without its end": b"HMSG _INBOX 1 4 4\r\nNATS\r\n",
    "header block of no bytes": b"HMSG _INBOX 1 0 0\r\n\r\n",
    "more headers than bytes": b"HMSG _INBOX 1 50 10\r\n0123456789\r\n",
    "negative sizes": b"MSG _INBOX 1 -5\r\n\r\n",
    "a size of many digits": b"MSG _INBOX 1 " + b"9" * 5000 + b"\r\n",
    "10 GB": b"MSG _INBOX 1 10000000000\r\n",
    "99,999,999,999": b"HMSG _INBOX 1 99999999999 99999999999\r\n",
    "2 GB that do not come": b"MSG _INBOX 1 2000000000\r\n",
    "a subject that is not UTF-8": b"MSG _INBOX.\xff 1 1\r\nx\r\n",
    "a reply that is not UTF-8": b"MSG _INBOX.x 1 \xff\xfe 1\r\nx\r\n",
    "a sid that nobody has": message(b"x", b"y", 99),
    "an error": b"-ERR 'You are out'\r\n",
    "an error without text": b"-ERR \r\n",
    "an error that is not UTF-8": b"-ERR '\xff'\r\n",
    "PONG upon PONG": b"PONG\r\n" * 1000,
    "zeros": bytes(100_000),
    "a line without end": b"MSG " + b"x" * (2 << 20),
}


@pytest.mark.parametrize("name", AFTERWARDS)
def test_info_after_greeting_is_handled(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A server that sends this instead of a response."""
    with caplog.at_level(logging.DEBUG), peak() as memory:  # noqa: SIM117
        with Rogue(after_pong=AFTERWARDS[name]) as rogue:
            caught = fails(rogue, len(AFTERWARDS[name]), 0.25, **WHO)
    assert memory.grown < 64 << 20
    assert SECRET not in caplog.text + caught


def fails(rogue: Rogue, size: int, seconds: float, **options: str) -> str:
    """A read that fails after it was sent more than ``size`` bytes; the text of its error."""
    for patience in PATIENCE:
        times = dict.fromkeys(("connectTimeout", "requestTimeout"), seconds * patience)
        with pytest.raises(NatsSourceError) as caught:
            read(rogue.url, bucket="b", **times, **options)
        if rogue.sent > size:
            return str(caught.value)
    raise AssertionError(f"only {rogue.sent} bytes were sent")


@pytest.mark.faults
@pytest.mark.parametrize(
    "endless",
    [
        b"PING\r\n" * 5000,
        b"PONG\r\n" * 5000,
        b"+OK\r\n" * 5000,
        greeting(connect_urls=["127.0.0.1:1"]) * 200,
        b"MSG x 99 100000\r\n" + bytes(100_000) + b"\r\n",
        b"HMSG x 1 20 20\r\nNATS/1.0\r\na: bcde\r\n\r\n\r\n" * 1000,
    ],
    ids=["PING", "PONG", "OK", "INFO", "messages of nobody", "messages"],
)
def test_info_without_end_is_refused(endless: bytes) -> None:
    """A server that never stops: the read ends in time, and memory stays where it was."""
    with peak() as memory, Rogue(endless=endless) as rogue:
        fails(rogue, 1_000_000, 1.0)
    # What cutting the 4 MiB that are received ahead into the smallest of frames takes.
    assert memory.grown < 512 << 20


async def test_servers_that_are_announced_without_end() -> None:
    """Each INFO names others; only so many are kept."""
    many = b"".join(
        greeting(connect_urls=[f"10.0.{i}.{j}:4222" for j in range(256)]) for i in range(40)
    )

    async def work(url: str) -> int:
        async with await Connection.open(ConnectionSettings(servers=(url,))) as connection:
            while await connection.alive(60):
                if len(connection.client._server_pool) >= 1000:
                    break
            await connection.alive(60)
            return len(connection.client._server_pool)

    with Rogue(after_pong=many) as rogue, deadline():
        assert await work(rogue.url) == 1000


# -- and then it is itself again ----------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\r\n",
        b"INFO {]\r\n",
        b"INFO []\r\n",
        b'INFO {"max_payload":-1}\r\n',
        b"MSG \xff 1 1\r\nx\r\n",
        b"-ERR '\xff'\r\n",
    ],
    ids=repr,
)
async def test_connection_survives_unreadable_info(
    shared_server: NatsServer, garbage: bytes
) -> None:
    """The connection reconnects without an error."""
    injected = 0

    def verdict(frame: bytes) -> bool | bytes:
        nonlocal injected
        if injected or b"account_info" not in frame:
            return True
        injected += 1
        sid = frame.split(b" ")[2]
        return garbage.replace(b" 1 1\r", b" " + sid + b" 1\r")

    async def work(url: str) -> int:
        async with connect(url, request_timeout=3) as jetstream:
            with contextlib.suppress(NatsSourceError):
                await jetstream.call("INFO")
            await jetstream.connection.wait_connected(60)
            await retry_transient(lambda: jetstream.call("INFO"), 60)
            return jetstream.connection.reconnects

    with Proxy(shared_server.port, verdict) as proxy, deadline():
        assert await work(proxy.url) == 1
    assert injected == 1


@pytest.mark.parametrize("name", ["a list", "not NATS", "nested", "max_payload is a text"])
async def test_connection_survives_invalid_greeting(name: str) -> None:
    """At a reconnect: the next attempt is made, and the one after that."""

    async def work(rogue: Rogue) -> None:
        async with await Connection.open(ConnectionSettings(servers=(rogue.url,))) as connection:
            rogue.greets = GREETINGS[name]
            connection.reconnect()
            while len(rogue.received) < 4:  # noqa: ASYNC110  (another thread's)
                await asyncio.sleep(0.01)
            rogue.greets = greeting()
            await connection.wait_connected(60)

    with Rogue() as rogue, deadline():
        await work(rogue)


# -- elsewhere ----------------------------------------------------------------------------------


class Between(ThreadServer):
    """A relay on the way to a server, which puts another greeting in the place of its own.

    It sees nothing of what TLS hides.
    """

    def __init__(self, server: NatsServer, greets: bytes) -> None:
        super().__init__()
        self._target, self._greets = server.port, greets

    async def _serve(self, down: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        up, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        await up.readline()
        to_client.write(self._greets)
        try:
            await until_one_ends(_pump(down, to_server), _pump(up, to_client))
        finally:
            to_server.transport.abort()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()


class Elsewhere(Rogue):
    """A host of the attacker, with a certificate that every client trusts."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(greeting(auth_required=True, tls_required=True), host="127.0.0.2")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(pair.cert, pair.key)
        self.connections = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.write(self.greets)
        await writer.drain()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            # Python 3.10 has no StreamWriter.start_tls.
            loop = asyncio.get_running_loop()
            protocol = asyncio.StreamReaderProtocol(inner := asyncio.StreamReader())
            await loop.start_tls(writer.transport, protocol, self._context, server_side=True)
            self.received.append(bytearray(await inner.readuntil(b"\r\n")))


async def test_tls_connection_ignores_unencrypted_info(tmp_path: Path) -> None:
    """A password is not sent to a host that only the greeting, which is in the clear, named."""
    ca = Authority(tmp_path, "ca")
    server, other = ca.issue("server"), ca.issue("other", ("localhost", "127.0.0.1", "127.0.0.2"))
    config = tmp_path / "server.conf"
    config.write_text(
        f'tls {{ cert_file: "{server.cert}", key_file: "{server.key}" }}\n'
        f'authorization {{ user: me, password: "{SECRET}" }}\n'
    )

    async def work(url: str) -> list[str]:
        settings = ConnectionSettings(
            servers=(url,), tls_ca_file=ca.path, connect_timeout=60, **WHO
        )
        async with await Connection.open(settings) as connection:
            for times in range(1, 6):  # nats-py picks one of those it knows
                connection.reconnect()
                await connection.wait_connected(60)
                assert connection.reconnects == times
            return [one.uri.netloc for one in connection.client._server_pool]

    with NatsServer(config=config) as real, Elsewhere(other) as elsewhere:
        lie = greeting(
            auth_required=True, tls_required=True, connect_urls=[f"127.0.0.2:{elsewhere.port}"]
        )
        with Between(real, lie) as relay, deadline():
            netloc = f"127.0.0.1:{relay.port}"
            assert await work(f"tls://{netloc}") == [netloc]
    assert elsewhere.connections == 0
    assert SECRET.encode() not in elsewhere.everything


async def test_plain_connection_follows_cluster_info() -> None:
    """Without TLS the client accepts any server, and its addresses of the other servers."""
    with Rogue(greeting(), host="127.0.0.2") as other:
        there = f"127.0.0.2:{other.port}"

        async def work(url: str) -> list[str]:
            async with await Connection.open(ConnectionSettings(servers=(url,))) as connection:
                return [one.uri.netloc for one in connection.client._server_pool]

        said = greeting(connect_urls=[there, "not an address", "[:::]:1"])
        with Rogue(said) as rogue, deadline():
            assert await work(rogue.url) == [f"127.0.0.1:{rogue.port}", there]
