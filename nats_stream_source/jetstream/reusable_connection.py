"""A connection that is reused, and replaced if it is dead.

A Spark task uses a connection for seconds; then its process pauses for minutes without a running
event loop. The server may close the connection meanwhile, and nats-py does not notice. So a kept
connection is reused only after a PONG. nats-py first gets time to reconnect by itself, since it has
the addresses that the cluster announced; then a new connection replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from nats_stream_source.aio.tasks import wait_cancellable
from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.retry import Outage, retry_transient

T = TypeVar("T")

_PING_DEADLINE = 2.0  # seconds
_FRESH = 1.0  # seconds after a use during which a PING is not required


class ReusableConnection:
    """At most one open connection with ``settings``.

    Attributes:
        was_connected: whether there was a connection: the settings lead to a server.
        outage: the outages that its reader waits out; None if it does not wait.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings
        self.was_connected = False
        self.outage: Outage | None = None
        self._connection: Connection | None = None
        self._used = 0.0
        self._replacing = asyncio.Lock()  # of callers that run at the same time, one opens

    async def connection(self, *, fresh: float = _FRESH) -> Connection:
        """A live connection: the kept one if it responds, else a new one.

        Args:
            fresh: seconds after the last call during which the kept one is not tested again.

        Raises:
            ConnectError, AuthorizationError: as :meth:`Connection.open`.
        """
        async with self._replacing:
            now = asyncio.get_running_loop().time()
            kept = self._connection
            if kept is not None and not await self._is_alive(kept, now - self._used < fresh):
                await self.drop()
                kept = None
            if kept is None:
                kept = self._connection = await Connection.open(self.settings)
                self.was_connected = True
            self._used = now
            return kept

    async def jetstream(self) -> JetStream:
        """JetStream over :meth:`connection`."""
        return JetStream(await self.connection())

    async def retry_transient(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call ``work``; repeat it while the server is unavailable.

        For at most ``connect_timeout``, or as long as :attr:`outage` waits.
        """
        if self.outage is not None:
            return await self.outage.retry(work)
        return await retry_transient(work, self.settings.connect_timeout)

    def wait_for_outages(self, timeout: float) -> None:
        """From now on, wait out outages of ``timeout`` seconds; 0 for ``connect_timeout``."""
        self.outage = Outage(timeout, self.settings.server_list) if timeout else None

    async def _is_alive(self, kept: Connection, fresh: bool) -> bool:
        if kept.client.is_connected and fresh:
            return True
        if kept.client.is_reconnecting:
            with contextlib.suppress(asyncio.TimeoutError):
                await wait_cancellable(self.settings.connect_timeout, kept.online.wait())
        return kept.client.is_connected and await kept.alive(_PING_DEADLINE)

    async def drop(self) -> None:
        """Close the kept connection, if any."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class SharedConnection(ReusableConnection):
    """A connection that several readers share in one continuously running event loop.

    Its owner closes it. Where a reader with its own :class:`ReusableConnection` closes the
    connection, this class makes nats-py reconnect, which the other readers survive.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.settings)
        self._connection = connection

    async def connection(self, *, fresh: float = _FRESH) -> Connection:
        """The shared connection, once it is connected and, with ``fresh`` 0, has sent a PONG.

        Raises:
            ConnectError: it was closed, or did not reconnect in time, see :meth:`retry_transient`.
        """
        shared = self._connection
        assert shared is not None
        if shared.client.is_connected and fresh:
            return shared
        if shared.client.is_connected and not await shared.alive(_PING_DEADLINE):
            shared.reconnect()
        timeout = self.settings.connect_timeout
        if self.outage is not None:
            timeout = min(timeout, self.outage.timeout)
        await shared.wait_connected(timeout)
        return shared

    async def drop(self) -> None:
        """Make the shared connection reconnect."""
        assert self._connection is not None
        self._connection.reconnect()
