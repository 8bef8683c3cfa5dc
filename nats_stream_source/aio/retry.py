"""Retries with exponential back-off, on tenacity.

While a server restarts, or a stream elects a leader, requests fail for a moment. Every request that
this package sends can be repeated, so a transient failure must not fail a query.

:func:`retry` repeats a call: it takes the failures and results to retry on, a time limit or an
attempt limit, and a :class:`Backoff`. A state machine that repeats more than one call, such as the
ordered consumer's rebuild, keeps its own loop and uses the :class:`Backoff` alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    retry_if_result,
    stop_after_attempt,
    stop_after_delay,
    stop_any,
)

from nats_stream_source.errors import (
    ApiError,
    AuthorizationError,
    ConnectError,
    ConsumerLimitError,
    RequestTimeoutError,
    TlsError,
)
from nats_stream_source.logs import field_logger

T = TypeVar("T")

_MAX_DOUBLINGS = 60  # beyond them the float would overflow

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


def is_transient(error: BaseException) -> bool:
    """Whether a failure is transient, so that a retry can succeed.

    Transient failures: no response, no leader, a lost connection, and a consumer limit that is
    reached.
    """
    if isinstance(error, ConsumerLimitError):
        return True
    if isinstance(error, ApiError):
        return error.code is not None and error.code >= 500
    return isinstance(error, (RequestTimeoutError, ConnectError)) and not isinstance(
        error, (AuthorizationError, TlsError)
    )


async def retry(
    work: Callable[[], Awaitable[T]],
    *,
    seconds: float | None = None,
    attempts: int | None = None,
    backoff: Backoff = Backoff(),
    on_error: Callable[[BaseException], bool] = is_transient,
    until: Callable[[T], bool] | None = None,
    message: str | None = "retrying request",
    **fields: Any,
) -> T:
    """Call ``work`` until it succeeds or a limit is reached.

    Args:
        seconds: time limit. The pauses end at it; a call that started before is not interrupted.
        attempts: limit of the number of calls. One of the two limits is required.
        backoff: the pauses between two calls.
        on_error: the exceptions that are retried; all others are raised immediately.
        until: the results that end the retries; every result does when None.
        message: text of the log line of each retry after an exception; None logs nothing.
        fields: further fields of that log line.

    Returns:
        the result of the last call. At a limit that is a result for which ``until`` is False.

    Raises:
        the exception of the last call, unchanged, when a limit is reached.
    """
    if seconds is None and attempts is None:
        raise ValueError("retry() requires a limit: seconds or attempts")
    limits = [] if seconds is None else [stop_after_delay(seconds)]
    stop = stop_any(*limits, *([] if attempts is None else [stop_after_attempt(attempts)]))
    condition = retry_if_exception(on_error)
    again = condition if until is None else condition | retry_if_result(lambda r: not until(r))

    def pause(state: RetryCallState) -> float:
        wanted = backoff.pause(state.attempt_number - 1)
        if seconds is None:
            return wanted
        return min(wanted, max(seconds - (state.seconds_since_start or 0.0), 0.0))

    def log_retry(state: RetryCallState) -> None:
        outcome = state.outcome
        if message is not None and outcome is not None and outcome.failed:
            log.warning(message, attempt=state.attempt_number, error=outcome.exception(), **fields)

    def last_outcome(state: RetryCallState) -> T:
        assert state.outcome is not None
        result: T = state.outcome.result()
        return result

    async def call() -> T:  # tenacity awaits only the result of a coroutine function
        return await work()

    retrying = AsyncRetrying(
        retry=again,
        stop=stop,
        wait=pause,
        before_sleep=log_retry,
        retry_error_callback=last_outcome,
    )
    return await retrying(call)


async def retry_transient(work: Callable[[], Awaitable[T]], seconds: float) -> T:
    """:func:`retry` after transient failures, for at most about ``seconds``."""
    return await retry(work, seconds=seconds)
