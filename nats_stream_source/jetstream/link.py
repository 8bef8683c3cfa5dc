"""A connection that is kept between uses and replaced when it is dead.

A Spark task uses a connection for seconds, then its process sleeps for minutes with nobody running
the event loop: the server may have closed it meanwhile, and nats-py would not know. So a kept
connection is used only after a PING was answered, and nats-py is given time to reconnect by itself
(it knows the servers that the cluster announced) before a new connection is made.
"""

from __future__ import annotations

import asyncio
import contextlib

from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.connection import Connection, ConnectionSettings
from nats_stream_source.jetstream.within import within

_PING_DEADLINE = 2.0  # seconds
_FRESH = 1.0  # seconds after a use in which no PING is needed


class Link:
    """At most one open connection to what ``settings`` name."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings
        self._connection: Connection | None = None
        self._used = 0.0

    def __repr__(self) -> str:
        return f"<Link {self._connection or self.settings.places}>"

    async def connection(self, *, fresh: float = _FRESH) -> Connection:
        """A live connection: the kept one if it answers, else a new one.

        Args:
            fresh: seconds since the last call within which the kept one is not asked again.

        Raises:
            ConnectError, AuthorizationError: as :meth:`Connection.open`.
        """
        now = asyncio.get_running_loop().time()
        kept = self._connection
        if kept is not None and not await self._lives(kept, now - self._used < fresh):
            await self.drop()
            kept = None
        if kept is None:
            kept = self._connection = await Connection.open(self.settings)
        self._used = now
        return kept

    async def jetstream(self) -> JetStream:
        """JetStream over :meth:`connection`."""
        return JetStream(await self.connection())

    async def _lives(self, kept: Connection, fresh: bool) -> bool:
        if kept.client.is_connected and fresh:
            return True
        if kept.client.is_reconnecting:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self.settings.connect_timeout, kept.online.wait())
        return kept.client.is_connected and await kept.alive(_PING_DEADLINE)

    async def drop(self) -> None:
        """Close the kept connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class SharedLink(Link):
    """A connection that others use at the same time, in an event loop that never rests.

    Its owner closes it. What a reader on a :class:`Link` of its own does by closing the connection
    is done here by making nats-py reconnect, which all others survive.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.settings)
        self._connection = connection

    async def connection(self, *, fresh: float = _FRESH) -> Connection:
        """The shared connection, once it is there and, with ``fresh`` 0, has answered a PING.

        Raises:
            ConnectError: it was closed, or did not come back within ``connect_timeout``.
        """
        shared = self._connection
        assert shared is not None
        if shared.client.is_connected and fresh:
            return shared
        if shared.client.is_connected and not await shared.alive(_PING_DEADLINE):
            shared.renew()
        await shared.until_connected(self.settings.connect_timeout)
        return shared

    async def drop(self) -> None:
        """Make the shared connection anew."""
        assert self._connection is not None
        self._connection.renew()
