"""Three things that nats-py leaves out while it connects.

*A server that does not encrypt is refused before anything is sent to it.* nats-py goes on in the
clear where a server's greeting (INFO) asks for no TLS, whatever the address says, and sends the
credentials. The greeting is the one thing that comes before them, at the first connect and at each
reconnect, so it is looked at there.

*An attempt that failed is over.* nats-py keeps its socket open; and where the TLS handshake failed,
it waits for ever for that socket to be closed, and never comes to the next server.

*A connect that was given up leaves no socket behind.* nats-py calls itself closed before it closes
its transport; when it is cancelled in between, its ``close()`` does nothing any more.

Beside ``bridge`` and ``repairs`` this is the one place that touches private names of nats-py,
``Client._process_info`` and ``Client._transport``; ``tests/test_security.py`` checks them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from nats_stream_source.jetstream.bridge import abort


class PlainServerError(nats.errors.Error):
    """The server does not encrypt, and the client asked for TLS."""


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


async def give_up(client: Client, deadline: float) -> None:
    """Close the transport of a client whose ``connect`` was cancelled, within ``deadline`` s."""
    if client._transport is None:
        return
    abort(client)
    closing = asyncio.ensure_future(client._transport.wait_closed())  # type: ignore[no-untyped-call]
    # Not by `wait_for`: what is waited for was perhaps cancelled with `connect`, and says so.
    await asyncio.wait({closing}, timeout=deadline)
    closing.cancel()
    # What ended the connection is told again here, and was told to the user already.
    await asyncio.gather(closing, return_exceptions=True)
