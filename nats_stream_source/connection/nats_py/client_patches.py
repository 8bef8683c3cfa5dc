"""Patches against errors that would close a connected nats-py client although it could continue.

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

Private names of nats-py in use, verified by
``tests/integration/jetstream/connection/test_connection.py``: ``Client._process_pong``, ``_pongs``,
``_process_err``, ``_process_op_err`` and ``_error_cb``.
"""

from __future__ import annotations

import asyncio

import nats.errors
from nats.aio.client import Client

from nats_stream_source.connection.nats_py.socket_tap import error_as_sent

REFUSALS = ("authorization violation", "authentication expired", "authentication revoked")
TOO_LONG = "maximum control line exceeded"
_CONTINUES = (
    "maximum subscriptions exceeded",
    "invalid subject",
    "invalid publish subject",
    "permissions violation",
)
_STALE = "stale connection"


def apply_patches(client: Client) -> None:
    """Patch ``client`` against the errors in the module's docstring."""
    _patch_cancelled_pings(client)
    _patch_errors(client)


def _patch_cancelled_pings(client: Client) -> None:
    original = client._process_pong

    async def process_pong() -> None:
        if client._pongs and client._pongs[0].done():
            client._pongs[0] = asyncio.get_running_loop().create_future()
        await original()

    client._process_pong = process_pong  # type: ignore[method-assign]


def _patch_errors(client: Client) -> None:
    original = client._process_err

    async def process_err(err_msg: str) -> None:
        lower = err_msg.lower()
        if _STALE in lower:
            await original(err_msg)
            return
        error = nats.errors.Error(f"nats: {error_as_sent(client) or err_msg}")
        await client._error_cb(error)
        if not any(text in lower for text in _CONTINUES):
            await client._process_op_err(error)

    client._process_err = process_err  # type: ignore[method-assign]
