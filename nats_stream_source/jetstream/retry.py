"""Retries with exponential back-off, and outages that a running query waits out.

While a server restarts, or a stream elects a leader, requests fail for a moment. Every request that
this package sends can be repeated, so a transient failure must not fail a query.

:func:`retry` repeats one call within a limit. An :class:`Outage` is the limit of all requests of
one planner or reader: it begins with the first failure, or the wait for a connection before it, and
ends with the next success, whichever request receives them. A state machine that repeats more than
one call, such as the ordered consumer's rebuild, keeps its own loop and uses :class:`Backoff`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from nats_stream_source import err_codes
from nats_stream_source.errors import (
    ApiError,
    AuthorizationError,
    ConnectError,
    ConsumerLimitError,
    RequestTimeoutError,
    TlsError,
)
from nats_stream_source.logs import field_logger
from nats_stream_source.metrics.table import OUTAGE_SECONDS, OUTAGES, RETRIES, count

T = TypeVar("T")

_MAX_DOUBLINGS = 60  # beyond them the float would overflow
_LOG_INTERVAL = 10.0  # seconds between two log lines of an outage

log = field_logger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off.

    Attributes:
        first: the first pause, in seconds; each further one is twice as long.
        longest: the longest pause, in seconds.
    """

    first: float = 0.05
    longest: float = 1.0

    def pause(self, retries: int) -> float:
        """Return the pause, in seconds, after ``retries`` earlier retries without success."""
        return min(self.first * 2.0 ** min(retries, _MAX_DOUBLINGS), self.longest)


_BACKOFF = Backoff()


def is_transient(error: BaseException) -> bool:
    """Whether a failure is transient, so that a retry can succeed.

    Transient failures: no response, no leader, a lost connection, and a consumer limit that is
    reached.
    """
    return isinstance(error, ConsumerLimitError) or is_outage(error)


def is_outage(error: BaseException) -> bool:
    """Whether a failure shows that servers are unavailable, or a stream has no leader."""
    if isinstance(error, ConsumerLimitError):
        return False
    if isinstance(error, ApiError):
        permanent = error.err_code in err_codes.PERMANENT
        return error.code is not None and error.code >= 500 and not permanent
    return isinstance(error, (RequestTimeoutError, ConnectError)) and not isinstance(
        error, (AuthorizationError, TlsError)
    )


async def retry(
    work: Callable[[], Awaitable[T]],
    *,
    seconds: float = math.inf,
    attempts: float = math.inf,
    backoff: Backoff = _BACKOFF,
    on_error: Callable[[Exception], bool] = is_transient,
    log_retries: bool = False,
) -> T:
    """Call ``work`` until it succeeds or a limit is reached; then raise its last exception.

    Args:
        seconds: time limit. The pauses end at it; a call that started before is not interrupted.
        attempts: limit of the number of calls.
        backoff: the pauses between two calls.
        on_error: the exceptions that are retried; all others are raised immediately.
        log_retries: log a line for each retry.
    """
    deadline = time.monotonic() + seconds
    for failures in itertools.count(1):
        try:
            return await work()
        except Exception as error:  # any error: the caller decides which are retried
            remaining = deadline - time.monotonic()
            if not on_error(error) or failures >= attempts or remaining <= 0:
                raise
            if log_retries:
                log.warning("retrying request", attempt=failures, error=error)
                count(RETRIES)
        await asyncio.sleep(min(backoff.pause(failures - 1), remaining))
    raise AssertionError("unreachable")


async def retry_transient(work: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Retry after transient failures, for at most about ``seconds``."""
    return await retry(work, seconds=seconds, log_retries=True)


class Outage:
    """The availability of the servers for one planner or reader, and how long it waits for them.

    It logs a line when an outage begins, one every ten seconds, and one when it ends.

    Args:
        timeout: seconds; an outage that lasts longer is an error.
        servers: the servers, for the log.
    """

    def __init__(self, timeout: float, servers: str) -> None:
        self.timeout = timeout
        self._servers = servers
        self._began: float | None = None
        self._logged = 0.0
        self._failures = 0

    async def retry(self, work: Callable[[], Awaitable[T]], *, ends: bool = True) -> T:
        """Call ``work`` until it succeeds; raises its last error when the outage lasts too long.

        Args:
            ends: whether a success ends the outage. The success of a connection does not, where the
                stream lacks a leader.
        """
        while True:
            try:
                result = await work()
            except Exception as error:  # any error: wait() raises those that show no outage
                await self.wait(error)
                continue
            if ends:
                self.end()
            return result

    async def wait(self, error: Exception) -> None:
        """Wait a moment after a failure; raises it if it shows no outage, or one too long."""
        if not is_outage(error):
            raise error
        now = time.monotonic()
        if self._began is None:
            waited = error.waited if isinstance(error, ConnectError) else 0.0
            self._began, self._failures = now - waited, 0
            count(OUTAGES)
            self._log(now, self._began, "servers are away, waiting", error)
        remaining = self._began + self.timeout - now
        if remaining <= 0:
            raise error
        if now - self._logged >= _LOG_INTERVAL:
            self._log(now, self._began, "servers are still away", error)
        await asyncio.sleep(min(_BACKOFF.pause(self._failures), remaining))
        self._failures += 1
        count(RETRIES)

    def end(self) -> None:
        """Record a success."""
        if self._began is None:
            return
        seconds = time.monotonic() - self._began
        self._began = None
        count(OUTAGE_SECONDS, amount=seconds)
        log.warning("servers are back", servers=self._servers, seconds=round(seconds, 1))

    def _log(self, now: float, began: float, text: str, error: Exception) -> None:
        self._logged = now
        log.warning(
            text,
            servers=self._servers,
            seconds=round(now - began, 1),
            timeout=self.timeout,
            error=error,
        )
