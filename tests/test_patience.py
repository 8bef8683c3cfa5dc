"""Which failures are worth asking again, and for how long."""

from __future__ import annotations

import asyncio

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
from nats_stream_source.jetstream.patience import passes, patiently


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
        (ApiError("without a number"), False),
        (DataLossError("gone"), False),
        (ValueError("a mistake"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_passes(error: Exception, expected: bool) -> None:
    assert passes(error) is expected


class Work:
    """Fails as told, then is done."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"


def test_asks_again_until_it_passes() -> None:
    work = Work(RequestTimeoutError("1"), ConnectError("2"))
    assert asyncio.run(patiently(work, 10.0)) == "done"
    assert work.calls == 3


def test_any_other_failure_is_raised_at_once() -> None:
    work = Work(StreamNotFoundError("none"))
    with pytest.raises(StreamNotFoundError):
        asyncio.run(patiently(work, 10.0))
    assert work.calls == 1


def test_when_time_is_up_the_last_failure_is_raised_as_it_is() -> None:
    work = Work(*(RequestTimeoutError(str(n)) for n in range(100)))
    with pytest.raises(RequestTimeoutError):
        asyncio.run(patiently(work, 0.2))
    assert 2 <= work.calls < 100
