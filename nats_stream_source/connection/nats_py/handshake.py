"""Checks and clean-up that nats-py omits while it connects, and errors that it survives.

*A server without TLS is refused before anything is sent to it.* nats-py continues without TLS if
the server's INFO does not require it, whatever the URL contains, and sends the credentials. INFO is
the only message that precedes them, at the first connect and at each reconnect, so it is checked
there.

*Announced servers are trusted only behind TLS.* A server announces the servers of its cluster in
INFO (``connect_urls``), and nats-py sends them the credentials when it reconnects. If TLS is
required, the addresses in the first INFO are dropped: it arrives before TLS (except with
``tls_handshake_first``), and an attacker on the path could name a host of their own that has a
valid certificate. Servers from 2.12 on repeat the addresses behind TLS. Invalid addresses are
dropped, and the list has a maximum length.

*An invalid INFO* (not JSON, a string instead of an integer) is a failed attempt like any other.
nats-py's reconnect task would end at it without a message.

*The limit of the user is in a later INFO.* The first INFO has the ``max_payload`` of the server,
the INFO behind the first PONG that of the account and the user. A server closes the connection
after a larger message. nats-py reads the limit from the first INFO only.

*The reader has the reason of a lost connection.* A server refuses a client certificate after the
TLS handshake, with an alert (TLS 1.3). If asyncio's ``drain`` is called just before the alert is
processed, it raises "Connection lost", and only the reader has the alert.

*A failed attempt is closed.* nats-py keeps its socket open. After a failed TLS handshake it waits
for that socket to be closed, for ever, and never tries the next server.

*A cancelled connect leaves no socket open.* nats-py marks itself closed before it closes its
transport; if it is cancelled in between, its ``close()`` does nothing. It does not wait for a
reconnect that is running, which may open a socket later; nor does a reconnect wait for the one that
it replaces.

*A cancelled PING.* nats-py keeps the futures of PINGs in a list and sets the result of the first
one when a PONG arrives. If the waiting task was cancelled or timed out, setting the result fails
inside the read loop. The read loop ends without a message, and no request gets a response any more.

*A refusal while connected.* When a user's JWT expires, or a user is removed from the server's
configuration, nats-py closes the client permanently. The credentials may have been renewed
meanwhile, so the client reconnects. Without renewed credentials that fails as any reconnect does.

*An error of one command.* nats-py closes the client permanently at every other error. After too
many subscriptions or an invalid subject, the server keeps the connection without the subscription:
the error goes to the connection (``connection.permissions``). After the rest, such as a line or a
payload that is too long, the server closes the connection, and the client reconnects.

Private names of nats-py in use, verified by ``test_authentication.py`` of
``tests/integration/jetstream/connection/`` and ``test_connection_survival.py`` of
``tests/faults/network/``: ``Client._process_info``, ``_process_connect_init``,
``_attempt_reconnect``, ``_max_payload``, ``_server_pool``, ``_transport``, ``_process_pong``,
``_pongs``, ``_process_err``, ``_process_op_err`` and ``_error_cb``; ``TcpTransport._io_reader``.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from nats_stream_source.aio.tasks import cancel_and_wait, wait_cancellable
from nats_stream_source.connection.nats_py.socket_tap import abort, error_as_sent
from nats_stream_source.errors import NatsSourceError

REFUSALS = ("authorization violation", "authentication expired", "authentication revoked")
TOO_LONG = "maximum control line exceeded"
_CONTINUES = (
    "maximum subscriptions exceeded",
    "invalid subject",
    "invalid publish subject",
    "permissions violation",
)
_STALE = "stale connection"

_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^\s/@:?#\[\]]+):\d{1,5}")
_REPLACE_DEADLINE = 2.0  # seconds that a reconnect waits for the end of the previous one
_MAX_SERVERS = 1000  # in the pool of a client; the largest clusters have some dozens


class PlainServerError(nats.errors.Error):
    """The server does not offer TLS, and the client requires it."""


class LongConnectError(nats.errors.Error):
    """The CONNECT line, with the credentials, is longer than the server accepts."""


class InvalidInfoError(nats.errors.Error):
    """The first message of the server is not a valid INFO."""


def verify_info(client: Client, *, require_tls: bool, trust_first_info: bool) -> None:
    """Patch ``client`` to validate INFO, and to use its limit and its trusted addresses only.

    Args:
        require_tls: refuse servers without TLS, also on reconnect (PlainServerError). Not for
            websocket: its URL requires TLS, and the TLS handshake precedes INFO.
        trust_first_info: whether the first INFO may announce servers; later ones always may.
    """
    original_info, original_init = client._process_info, client._process_connect_init

    async def process_info(info: dict[str, Any], initial_connection: bool = False) -> None:
        if require_tls and initial_connection and not info.get("tls_required"):
            if not info.get("tls_available"):
                raise PlainServerError("the server does not offer TLS")
            info["tls_required"] = True  # such a server leaves the choice to the client
        # A user's limit can be 0 bytes.
        _verify_types(info, least_payload=1 if initial_connection else 0)
        if not initial_connection:
            client._max_payload = info.get("max_payload", client.max_payload)
        info["connect_urls"] = (
            _addresses(info.get("connect_urls"), _MAX_SERVERS - len(client._server_pool))
            if trust_first_info or not initial_connection
            else []
        )
        await original_info(info, initial_connection)

    async def process_connect_init() -> None:
        try:
            await original_init()
        except ConnectionResetError as error:
            raise _read_error(client) or error from None
        except nats.errors.Error as error:
            if TOO_LONG in str(error).lower():
                raise LongConnectError("CONNECT is too long") from error
            raise
        except (OSError, asyncio.TimeoutError, NatsSourceError):
            raise
        except Exception as error:
            # Any error that an INFO can cause in nats-py; its text may contain anything.
            raise InvalidInfoError(
                f"invalid INFO from the server: it could not be processed ({type(error).__name__})"
            ) from error

    client._process_info = process_info  # type: ignore[method-assign]
    client._process_connect_init = process_connect_init  # type: ignore[method-assign]


def _read_error(client: Client) -> Exception | None:
    """The error with which the reader of the connection has ended."""
    reader = client._transport._io_reader if isinstance(client._transport, TcpTransport) else None
    return reader.exception() if reader is not None else None


def _verify_types(info: dict[str, Any], least_payload: int) -> None:
    for name, kind in (("max_payload", int), ("nonce", str), ("version", str)):
        if name in info and type(info[name]) is not kind:
            raise InvalidInfoError(
                f"invalid INFO from the server: field {name!r} must be of type {kind.__name__}"
            )
    if info.get("max_payload", 1) < least_payload:
        raise InvalidInfoError("invalid INFO from the server: 'max_payload' must be positive")


def _addresses(announced: Any, limit: int) -> list[str]:
    if not isinstance(announced, list):
        return []
    return [address for address in announced if _is_address(address)][: max(limit, 0)]


def _is_address(announced: Any) -> bool:
    if not isinstance(announced, str) or not _ADDRESS.fullmatch(announced):
        return False
    try:
        return bool(urlsplit(f"nats://{announced}").port)
    except ValueError:  # not an IPv6 address in brackets, or the port is too high
        return False


def close_failed_attempt(client: Client) -> None:
    """Close the socket of a failed attempt to connect, so that the next attempt opens its own."""
    if not client.is_connected and isinstance(client._transport, TcpTransport):
        abort(client)
        client._transport = None


class Reconnects:
    """The reconnects of a client: one at a time, and none after the client is closed."""

    def __init__(self, client: Client) -> None:
        self._original = client._attempt_reconnect
        self._running: set[asyncio.Task[Any]] = set()
        self._ended = False
        client._attempt_reconnect = self._reconnect  # type: ignore[method-assign]

    async def _reconnect(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        previous = set(self._running)
        self._running.add(task)
        try:
            await cancel_and_wait(previous, _REPLACE_DEADLINE)
            if not self._ended:
                await self._original()
        finally:
            self._running.discard(task)

    async def end(self, deadline: float) -> None:
        """Cancel the running ones and wait up to ``deadline`` seconds; later ones do not start."""
        self._ended = True
        await cancel_and_wait(set(self._running), deadline)


async def close_client(client: Client, deadline: float) -> Exception | None:
    """Close a client and its transport, within ``deadline`` seconds each; return the failure."""
    failure = None
    try:
        await wait_cancellable(deadline, client.close())
    except (
        OSError,
        asyncio.TimeoutError,
        nats.errors.Error,
        AssertionError,
        AttributeError,
    ) as error:
        # AssertionError: nats-py's own check after an early failure to connect.
        # AttributeError: nats-py writes to asyncio's TLS transport after it was lost.
        failure = error
    await close_transport(client, deadline)
    return failure


async def close_transport(client: Client, deadline: float) -> None:
    """Close the transport that ``client.close()`` left open, within ``deadline`` seconds."""
    if client._transport is None:
        return
    abort(client)
    closing = asyncio.ensure_future(client._transport.wait_closed())  # type: ignore[no-untyped-call]
    # Not `wait_for`: the awaited future may have been cancelled with `connect`, and would raise.
    await asyncio.wait({closing}, timeout=deadline)
    closing.cancel()
    # The error that ended the connection is raised here again; the user has got it already.
    await asyncio.gather(closing, return_exceptions=True)


def apply_patches(client: Client) -> None:
    """Patch ``client`` against cancelled PINGs, refusals and errors of one command."""
    original_pong, original_err = client._process_pong, client._process_err

    async def process_pong() -> None:
        if client._pongs and client._pongs[0].done():
            client._pongs[0] = asyncio.get_running_loop().create_future()
        await original_pong()

    async def process_err(err_msg: str) -> None:
        lower = err_msg.lower()
        if _STALE in lower:
            await original_err(err_msg)
            return
        error = nats.errors.Error(f"nats: {error_as_sent(client) or err_msg}")
        await client._error_cb(error)
        if not any(text in lower for text in _CONTINUES):
            await client._process_op_err(error)

    client._process_pong = process_pong  # type: ignore[method-assign]
    client._process_err = process_err  # type: ignore[method-assign]
