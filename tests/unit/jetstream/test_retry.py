"""Retries: transient failures, limits, pauses, log lines."""

from __future__ import annotations

import asyncio
import logging

import pytest

from nats_stream_source.errors import (
    ApiError,
    AuthorizationError,
    ConnectError,
    ConsumerLimitError,
    DataLossError,
    JetStreamNotEnabledError,
    PermissionDeniedError,
    RequestTimeoutError,
    StreamNotFoundError,
    TlsError,
)
from nats_stream_source.jetstream.retry import Backoff, is_transient, retry, retry_transient


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RequestTimeoutError("late"), True),
        (ConnectError("cut"), True),
        (JetStreamNotEnabledError("starting"), True),
        (ApiError("no leader", 503, 10008), True),
        (ConsumerLimitError("no more", 400, 10026), True),
        (AuthorizationError("wrong"), False),
        (TlsError("expired"), False),
        (PermissionDeniedError("no"), False),
        (StreamNotFoundError("none"), False),
        (ApiError("bad request", 400, 10025), False),
        (ApiError("no storage", 500, 10047), False),
        (ApiError("without a number"), False),
        (DataLossError("gone"), False),
        (ValueError("a mistake"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_transient_errors(error: Exception, expected: bool) -> None:
    assert is_transient(error) is expected


class Work:
    """Raises the given errors, then returns."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"


async def test_retry_until_success() -> None:
    work = Work(RequestTimeoutError("1"), ConnectError("2"))
    assert await retry_transient(work, 10.0) == "done"
    assert work.calls == 3


async def test_failures_of_other_kinds_are_raised_at_once() -> None:
    work = Work(StreamNotFoundError("none"))
    with pytest.raises(StreamNotFoundError):
        await retry_transient(work, 10.0)
    assert work.calls == 1


async def test_last_failure_is_raised_at_time_limit() -> None:
    work = Work(*(RequestTimeoutError(str(n)) for n in range(100)))
    with pytest.raises(RequestTimeoutError):
        await retry_transient(work, 0.2)
    assert 2 <= work.calls < 100


async def test_retries_are_limited_by_attempts() -> None:
    work = Work(*(ValueError(str(n)) for n in range(5)))
    with pytest.raises(ValueError, match="2"):
        await retry(work, attempts=3, backoff=Backoff(0, 0), on_error=lambda _: True)
    assert work.calls == 3


async def test_work_may_be_any_function_that_returns_awaitable() -> None:
    work = Work(ConnectError("1"))
    assert await retry_transient(lambda: work(), 10.0) == "done"
    assert work.calls == 2


async def test_pauses_end_at_time_limit() -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    with pytest.raises(RequestTimeoutError):
        await retry(Work(*[RequestTimeoutError("1")] * 9), seconds=0.1, backoff=Backoff(60, 60))
    assert 0.1 <= (loop.time() - start) < 30


async def test_retry_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await retry(Work(ConnectError("cut")), attempts=2, log_retries=True)
    assert caplog.messages == ["retrying request attempt=1 error=cut"]


def test_pauses_double_up_to_longest() -> None:
    backoff = Backoff(0.05, 2.0)
    assert [backoff.pause(n) for n in (0, 1, 2, 6, 5000)] == [0.05, 0.1, 0.2, 2.0, 2.0]
