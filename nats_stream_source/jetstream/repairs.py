"""What would end a connected nats-py client for all its users, though the connection can go on.

*A PING that was given up.* nats-py keeps the futures of PINGs in a list and sets the first one's
result when a PONG comes. Where whoever waited was cancelled, or had no time left, that is an error
inside its read loop, which ends, and nobody notices: no request is answered any more.

*A refusal while connected.* When a user's JWT expires, or a user is taken out of the server's
configuration, nats-py closes itself for good. What identifies the user may have been renewed
meanwhile, so the client reconnects, and fails as any other reconnect where that is not so.

*A subscription too many.* The server goes on without it; nats-py closes itself. The error is told
to the connection instead; who subscribed meets silence, as with any other consumer that is lost.

Private names of nats-py in use, checked by ``tests/test_connection.py``: ``Client._process_pong``,
``_pongs``, ``_process_err``, ``_process_op_err`` and ``_error_cb``.
"""

from __future__ import annotations

import asyncio

import nats.errors
from nats.aio.client import Client

REFUSALS = ("authorization violation", "authentication expired", "authentication revoked")
_TOO_MANY = "maximum subscriptions exceeded"


def outlive(client: Client) -> None:
    """Let ``client`` survive what is listed above."""
    _given_up_pings(client)
    _refusals(client)


def _given_up_pings(client: Client) -> None:
    go_on = client._process_pong

    async def process_pong() -> None:
        if client._pongs and client._pongs[0].done():
            client._pongs[0] = asyncio.get_running_loop().create_future()
        await go_on()

    client._process_pong = process_pong  # type: ignore[method-assign]


def _refusals(client: Client) -> None:
    go_on = client._process_err

    async def process_err(err_msg: str) -> None:
        lower = err_msg.lower()
        refused = client.is_connected and any(sign in lower for sign in REFUSALS)
        if not refused and _TOO_MANY not in lower:
            await go_on(err_msg)
            return
        error = nats.errors.Error(f"nats: {err_msg}")
        await client._error_cb(error)
        if refused:
            await client._process_op_err(error)

    client._process_err = process_err  # type: ignore[method-assign]
