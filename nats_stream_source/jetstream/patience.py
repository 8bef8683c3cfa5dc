"""Asking again when a server is restarting.

A server that restarts, or a stream that elects a leader, gives no answer for a moment. Every
request that this package makes can be repeated, so a passing failure is no reason to fail a query.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_delay,
    wait_exponential,
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

log = field_logger(__name__)


def passes(error: BaseException) -> bool:
    """Whether a failure may be over in a moment.

    No answer, no leader, a connection that was just lost, as many consumers as are allowed.
    """
    if isinstance(error, ConsumerLimitError):
        return True
    if isinstance(error, ApiError):
        return error.code is not None and error.code >= 500
    return isinstance(error, (RequestTimeoutError, ConnectError)) and not isinstance(
        error, (AuthorizationError, TlsError)
    )


def _say(attempt: RetryCallState) -> None:
    assert attempt.outcome is not None
    log.warning("asking again", attempt=attempt.attempt_number, error=attempt.outcome.exception())


async def patiently(work: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Run ``work``, and again after a failure that passes, for at most about ``seconds``.

    Raises:
        the last failure as it is, when time is up; any other failure at once.
    """
    async for attempt in AsyncRetrying(
        retry=retry_if_exception(passes),
        stop=stop_after_delay(seconds),
        wait=wait_exponential(multiplier=0.05, max=1),
        before_sleep=_say,
        reraise=True,
    ):
        with attempt:
            return await work()
    raise AssertionError("unreachable: the last failure is raised again")
