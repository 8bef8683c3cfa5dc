"""The client of nats-py that writes while faults are injected."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from nats.aio.client import Client

from tests.support.nats.buckets import connected


async def _ignore(error: Exception) -> None:
    pass  # connections are reset by the faults


def connected_under_faults(servers: list[str]) -> AbstractAsyncContextManager[Client]:
    """A client that reconnects without end and soon notices a server that does not respond."""
    return connected(
        servers,
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.2,
        connect_timeout=2,
        ping_interval=2,
        max_outstanding_pings=2,
        error_cb=_ignore,
    )
