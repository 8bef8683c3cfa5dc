"""What nats-py leaves out while it connects.

*A server that does not encrypt is refused before anything is sent to it.* nats-py goes on in the
clear where a server's greeting (INFO) asks for no TLS, whatever the address says, and sends the
credentials. The greeting is the one thing that comes before them, at the first connect and at each
reconnect, so it is looked at there.

*Who may say where else to go.* A server announces its cluster's servers in INFO
(``connect_urls``), and nats-py goes to them, with the credentials, when it reconnects. Where TLS
was asked for, what the greeting announces is not believed: it comes before TLS does (but for
``tls_handshake_first``), and whoever is on the way could name a host of his own, with a sound
certificate for it. Servers from 2.12 on say it again behind TLS. What is no address is dropped, and
a list that grows without end is cut off.

*A greeting that is none* (no JSON, a text where a number should be) is a failed attempt like any
other. nats-py's task for reconnecting would end at it without a word.

*An attempt that failed is over.* nats-py keeps its socket open; and where the TLS handshake failed,
it waits for ever for that socket to be closed, and never comes to the next server.

*A connect that was given up leaves no socket behind.* nats-py calls itself closed before it closes
its transport; when it is cancelled in between, its ``close()`` does nothing any more. And it does
not wait for a reconnect under way, which may open a socket after that; nor does a reconnect wait
for the one that it takes the place of.

Beside ``bridge`` and ``repairs`` this is the one place that touches private names of nats-py,
``Client._process_info``, ``_process_connect_init``, ``_attempt_reconnect``, ``_server_pool`` and
``_transport``;
``tests/test_security.py`` checks them.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from nats_stream_source.errors import NatsSourceError
from nats_stream_source.jetstream.bridge import abort
from nats_stream_source.jetstream.within import ended

_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^\s/@:?#\[\]]+):\d{1,5}")
_ONE_AT_A_TIME = 2.0  # seconds that a reconnect waits for the end of the one before
_MOST_SERVERS = 1000  # that are known at a time; the largest clusters have some dozens


class PlainServerError(nats.errors.Error):
    """The server does not encrypt, and the client asked for TLS."""


class BadGreetingError(nats.errors.Error):
    """What greets is no NATS server, or one that nothing here can speak with."""


def check_greetings(client: Client, *, believe: bool) -> None:
    """Let ``client`` survive any greeting, and follow only those that may be believed.

    Args:
        believe: whether the greeting may announce servers; what comes later always may.
    """
    look, go_on = client._process_info, client._process_connect_init

    async def process_info(info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection:
            _check(info)
        info["connect_urls"] = (
            _addresses(info.get("connect_urls"), _MOST_SERVERS - len(client._server_pool))
            if believe or not initial_connection
            else []
        )
        await look(info, initial_connection)

    async def process_connect_init() -> None:
        try:
            await go_on()
        except (OSError, nats.errors.Error, asyncio.TimeoutError, NatsSourceError):
            raise
        except Exception as error:
            # Whatever a greeting can make nats-py stumble over; its text may hold anything.
            raise BadGreetingError(
                f"what the server says first cannot be read ({type(error).__name__})"
            ) from error

    client._process_info = process_info  # type: ignore[method-assign]
    client._process_connect_init = process_connect_init  # type: ignore[method-assign]


def _check(info: dict[str, Any]) -> None:
    for name, kind in (("max_payload", int), ("nonce", str), ("version", str)):
        if name in info and type(info[name]) is not kind:
            raise BadGreetingError(f"the server's greeting has no sound {name!r}")
    if info.get("max_payload", 1) < 1:
        raise BadGreetingError("the server takes no messages: its 'max_payload' is not positive")


def _addresses(announced: Any, most: int) -> list[str]:
    if not isinstance(announced, list):
        return []
    return [one for one in announced if _is_address(one)][: max(most, 0)]


def _is_address(announced: Any) -> bool:
    if not isinstance(announced, str) or not _ADDRESS.fullmatch(announced):
        return False
    try:
        return bool(urlsplit(f"nats://{announced}").port)
    except ValueError:  # what stands in brackets is no IPv6 address, or the port is too high
        return False


def demand_tls(client: Client) -> None:
    """Let ``client`` refuse servers without TLS (:class:`PlainServerError`), also at a reconnect.

    Not for websocket, whose addresses say it, and whose TLS comes before the greeting.
    """
    go_on = client._process_info

    async def process_info(info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise PlainServerError("the server does not offer TLS")
            info["tls_required"] = True  # such a server leaves it to the client
        await go_on(info, initial_connection)

    client._process_info = process_info  # type: ignore[method-assign]


def forget_attempt(client: Client) -> None:
    """Close the socket of an attempt to connect that failed, so that the next one begins anew."""
    if not client.is_connected and isinstance(client._transport, TcpTransport):
        abort(client)
        client._transport = None


class Reconnects:
    """The reconnects of a client, one at a time, and none when it is closed."""

    def __init__(self, client: Client) -> None:
        self._go_on = client._attempt_reconnect
        self._under_way: set[asyncio.Task[Any]] = set()
        self._over = False
        client._attempt_reconnect = self._reconnect  # type: ignore[method-assign]

    async def _reconnect(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        before = set(self._under_way)
        self._under_way.add(task)
        try:
            await ended(before, _ONE_AT_A_TIME)
            if not self._over:
                await self._go_on()
        finally:
            self._under_way.discard(task)

    async def end(self, deadline: float) -> None:
        """Cancel those under way, and wait for their end ``deadline`` seconds; begin no other."""
        self._over = True
        await ended(set(self._under_way), deadline)


async def give_up(client: Client, deadline: float) -> None:
    """Close the transport that ``client.close()`` has left open, within ``deadline`` seconds."""
    if client._transport is None:
        return
    abort(client)
    closing = asyncio.ensure_future(client._transport.wait_closed())  # type: ignore[no-untyped-call]
    # Not by `wait_for`: what is waited for was perhaps cancelled with `connect`, and says so.
    await asyncio.wait({closing}, timeout=deadline)
    closing.cancel()
    # What ended the connection is told again here, and was told to the user already.
    await asyncio.gather(closing, return_exceptions=True)
