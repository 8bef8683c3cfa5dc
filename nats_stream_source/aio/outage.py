"""Waiting while servers are away.

A running query outlives servers that restart, or a stream without a leader: what fails for such a
reason is repeated until it succeeds, or until the outage has lasted ``timeout`` seconds. An outage
begins with the first failure and ends with the next success, whichever request meets them, so one
:class:`Outage` belongs to one planner or one reader. It logs a line when it begins, one every ten
seconds, and one when it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from nats_stream_source.aio.retry import Backoff, is_transient
from nats_stream_source.errors import ConsumerLimitError
from nats_stream_source.logs import field_logger

T = TypeVar("T")

log = field_logger(__name__)

_BACKOFF = Backoff(0.05, 1.0)
_LOG_INTERVAL = 10.0  # seconds


def is_outage(error: BaseException) -> bool:
    """Whether an error says that servers are away: transient, and not a limit that is reached."""
    return is_transient(error) and not isinstance(error, ConsumerLimitError)


class Outage:
    """The state of the servers for one planner or reader, and how long it waits for them.

    Args:
        timeout: seconds; an outage that lasts longer is an error.
        servers: the servers, for the log.
        clock, sleep: the time in seconds, and a wait of some; tests replace both.
    """

    def __init__(
        self,
        timeout: float,
        servers: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._timeout = timeout
        self._servers = servers
        self._clock = clock
        self._sleep = sleep
        self._began: float | None = None
        self._logged = 0.0
        self._failures = 0

    def __repr__(self) -> str:
        if self._began is None:
            return "<Outage none>"
        return f"<Outage for {self._clock() - self._began:.1f} s of {self._timeout:g} s>"

    async def outlive(self, work: Callable[[], Awaitable[T]], *, ends: bool = True) -> T:
        """Call ``work`` until it succeeds; raises its last error when the outage lasts too long.

        Args:
            ends: whether a success ends the outage: not that of a connection, where it is the
                stream that has no leader.
        """
        while True:
            try:
                result = await work()
            except Exception as error:  # any error: those that are no outage are raised unchanged
                await self.wait(error)
                continue
            if ends:
                self.end()
            return result

    async def wait(self, error: Exception) -> None:
        """Wait a moment after a failure.

        Raises:
            ``error``, if it is no outage, or if the outage has lasted too long.
        """
        if not is_outage(error):
            raise error
        now = self._clock()
        if self._began is None:
            self._began, self._failures = now, 0
            self._log(now, "servers are away, waiting", error)
        remaining = self._began + self._timeout - now
        if remaining <= 0:
            raise error
        if now - self._logged >= _LOG_INTERVAL:
            self._log(now, "servers are still away", error)
        await self._sleep(min(_BACKOFF.pause(self._failures), remaining))
        self._failures += 1

    def end(self) -> None:
        """Record a success."""
        if self._began is None:
            return
        seconds = self._clock() - self._began
        self._began = None
        log.warning("servers are back", servers=self._servers, seconds=round(seconds, 1))

    def _log(self, now: float, text: str, error: Exception) -> None:
        assert self._began is not None
        self._logged = now
        log.warning(
            text,
            servers=self._servers,
            seconds=round(now - self._began, 1),
            timeout=self._timeout,
            error=error,
        )
