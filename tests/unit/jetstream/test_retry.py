"""Retries and outages: what is repeated, for how long, and what is logged."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from nats_stream_source.errors import (
    ApiError,
    AuthorizationError,
    ConnectError,
    ConsumerLimitError,
    DataLossError,
    JetStreamNotEnabledError,
    NatsSourceError,
    PermissionDeniedError,
    RequestTimeoutError,
    StreamNotFoundError,
    TlsError,
)
from nats_stream_source.jetstream import retry as retry_module
from nats_stream_source.jetstream.retry import Backoff, Outage, is_transient, retry, retry_transient


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


AWAY = ConnectError("connection refused")


class Servers:
    """Servers that come back at a time, by a clock of their own."""

    now = 0.0
    back_at = 100.0
    error: NatsSourceError = AWAY
    calls = 0

    async def request(self) -> str:
        self.calls += 1
        self.now += 0.5
        if self.now < self.back_at:
            raise self.error
        return "back"

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    servers = Servers()
    monkeypatch.setattr(retry_module, "time", SimpleNamespace(monotonic=lambda: servers.now))
    monkeypatch.setattr(retry_module, "asyncio", SimpleNamespace(sleep=servers.sleep))
    return servers


async def test_outage_within_limit(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    servers.back_at = 35
    with caplog.at_level(logging.WARNING, "nats_stream_source"):
        assert await Outage(60, "nats://a").retry(servers.request) == "back"
    texts = [record.getMessage().split(" servers=")[0] for record in caplog.records]
    assert texts == [
        "servers are away, waiting",
        *["servers are still away"] * 3,
        "servers are back",
    ]


async def test_outage_absent_logs_nothing(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    servers.back_at = 0
    with caplog.at_level(logging.WARNING, "nats_stream_source"):
        assert await Outage(60, "nats://a").retry(servers.request) == "back"
    assert not caplog.records


async def test_outage_beyond_limit(servers: Servers) -> None:
    with pytest.raises(ConnectError, match="connection refused"):
        await Outage(60, "nats://a").retry(servers.request)
    assert 60 <= servers.now < 63


async def test_outage_spans_several_requests(servers: Servers) -> None:
    outage = Outage(60, "nats://a")
    await outage.wait(AWAY)
    servers.now = 50
    with pytest.raises(ConnectError):
        await outage.retry(servers.request)
    assert servers.now < 63
    outage.end()
    await outage.wait(AWAY)  # another one begins


@pytest.mark.parametrize(
    "error", [AuthorizationError("refused"), ConsumerLimitError("limit", 400, 10026)]
)
async def test_errors_of_other_kinds_are_raised_at_once(
    servers: Servers, error: NatsSourceError
) -> None:
    servers.error = error
    with pytest.raises(type(error)):
        await Outage(60, "nats://a").retry(servers.request)
    assert servers.calls == 1


async def test_stream_without_leader(servers: Servers) -> None:
    servers.back_at, servers.error = 20, RequestTimeoutError("no response")
    outage = Outage(60, "nats://a")
    assert await outage.retry(servers.request, ends=False) == "back"
    servers.back_at = 100
    with pytest.raises(RequestTimeoutError):
        await outage.retry(servers.request)
    assert servers.now < 63, "the connection is back, the stream is not: the outage continues"
