"""Whether a server responds: PING and PONG instead of a flag of the client."""

from __future__ import annotations

import asyncio

import nats.errors
from nats.aio.client import Client

from nats_stream_source.connection.nats_py.socket_tap import read_count

PONG_TIMEOUT = 5.0
"""Seconds without a PONG after which a server counts as lost."""


async def responds(
    client: Client, disconnected: asyncio.Event, timeout: float, max_wait: float
) -> bool:
    """Whether the server of ``client`` responds, as ``Connection.alive`` describes it."""
    limit = max(timeout, max_wait)
    ping = asyncio.ensure_future(client.rtt(limit))  # type: ignore[arg-type]
    # nats-py drops the pending PINGs when it reconnects, so their PONGs never arrive.
    offline = asyncio.ensure_future(disconnected.wait())
    try:
        while True:
            before = read_count(client)
            done, _ = await asyncio.wait(
                {ping, offline}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if done or not max_wait or read_count(client) == before:
                break
        if not ping.done():
            return False
        ping.result()
    except (nats.errors.Error, OSError, AttributeError, AssertionError):
        # The last two: nats-py does not have a transport between two attempts to reconnect.
        return False
    finally:
        for task in (ping, offline):
            task.cancel()
        await asyncio.gather(ping, offline, return_exceptions=True)
    return True
