"""Patches against errors that would close a connected nats-py client although it could continue.

*A cancelled PING.* nats-py keeps the futures of PINGs in a list and sets the result of the first
one when a PONG arrives. If the waiting task was cancelled or timed out, setting the result fails
inside the read loop. The read loop ends without a message, and no request gets a response any more.

*A refusal while connected.* When a user's JWT expires, or a user is removed from the server's
configuration, nats-py closes the client permanently. The credentials may have been renewed
meanwhile, so the client reconnects. Without renewed credentials that fails as any reconnect does.

*Too many subscriptions.* The server keeps the connection without the subscription; nats-py closes
the client. The error goes to the connection instead; the subscriber receives nothing, as with any
other lost consumer.

Private names of nats-py in use, verified by
``tests/integration/jetstream/connection/test_connection.py``: ``Client._process_pong``, ``_pongs``,
``_process_err``, ``_process_op_err`` and ``_error_cb``.
"""

from __future__ import annotations

import asyncio

import nats.errors
from nats.aio.client import Client

REFUSALS = ("authorization violation", "authentication expired", "authentication revoked")
_TOO_MANY = "maximum subscriptions exceeded"


def apply_patches(client: Client) -> None:
    """Patch ``client`` against the errors in the module's docstring."""
    _patch_cancelled_pings(client)
    _patch_refusals(client)


def _patch_cancelled_pings(client: Client) -> None:
    original = client._process_pong

    async def process_pong() -> None:
        if client._pongs and client._pongs[0].done():
            client._pongs[0] = asyncio.get_running_loop().create_future()
        await original()

    client._process_pong = process_pong  # type: ignore[method-assign]


def _patch_refusals(client: Client) -> None:
    original = client._process_err

    async def process_err(err_msg: str) -> None:
        lower = err_msg.lower()
        refused = client.is_connected and any(refusal in lower for refusal in REFUSALS)
        if not refused and _TOO_MANY not in lower:
            await original(err_msg)
            return
        error = nats.errors.Error(f"nats: {err_msg}")
        await client._error_cb(error)
        if refused:
            await client._process_op_err(error)

    client._process_err = process_err  # type: ignore[method-assign]
