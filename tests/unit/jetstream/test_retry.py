"""Times as the API writes them, deadlines, retries and outages."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from nats_stream_source.errors import (
    ApiError,
    AuthorizationError,
    ConfigurationError,
    ConnectError,
    ConsumerLimitError,
    DataLossError,
    JetStreamNotEnabledError,
    NatsSourceError,
    PermissionDeniedError,
    ProtocolError,
    RequestTimeoutError,
    StreamNotFoundError,
    TlsError,
)
from nats_stream_source.jetstream import retry as retry_module
from nats_stream_source.jetstream.publish.publisher import MessagesInFlight
from nats_stream_source.jetstream.retry import Backoff, Outage, is_transient, retry, retry_transient
from nats_stream_source.jetstream.times import nanoseconds, rfc3339
from tests.support.wait import wait_until_async


@pytest.mark.parametrize(
    ("when", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (1, "1970-01-01T00:00:00.000000001Z"),
        (1_500_000_000, "1970-01-01T00:00:01.5Z"),
        (-1, "1969-12-31T23:59:59.999999999Z"),
        ("2026-11-21T05:04:14.120+01:00", "2026-11-21T04:04:14.12Z"),
        (datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=2))), "2025-12-31T22:00:00Z"),
        (datetime(2026, 1, 1, 0, 0, 0, 7, timezone.utc), "2026-01-01T00:00:00.000007Z"),
    ],
)
def test_time_of_server_is_parsed(when: str | int | datetime, text: str) -> None:
    assert rfc3339(when) == text


@given(st.integers(0, 4 * 10**18))
def test_time_roundtrip(when: int) -> None:
    assert nanoseconds(rfc3339(when)) == when
    assert rfc3339(rfc3339(when)) == rfc3339(when)


def test_time_invalid() -> None:
    with pytest.raises(ProtocolError):
        rfc3339("yesterday")
    with pytest.raises(ConfigurationError, match="time zone"):
        rfc3339(datetime(2026, 1, 1))


async def test_deadline_counts_from_end_of_iteration() -> None:
    """The start of 100,000 tasks that publish can take longer than the timeout."""
    messages = MessagesInFlight(limit=10, timeout=0.1)
    first, message = messages.add("s", 0)
    time.sleep(0.2)  # noqa: ASYNC251
    second, _ = messages.add("s", 0)
    assert messages.overdue() == []
    await asyncio.sleep(0)
    deadline = messages.next_deadline()
    assert deadline is not None
    assert 0 < deadline - messages.now() <= 0.1
    await wait_until_async(lambda: messages.overdue() == [first, second], "the deadline passes")
    message.cancel()


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


@pytest.mark.parametrize(
    ("back_at", "logged"),
    [
        (0, []),
        (
            35,
            ["servers are away, waiting", *["servers are still away"] * 3, "servers are back"],
        ),
    ],
)
async def test_outage_within_limit(
    servers: Servers, caplog: pytest.LogCaptureFixture, back_at: float, logged: list[str]
) -> None:
    servers.back_at = back_at
    with caplog.at_level(logging.WARNING, "nats_stream_source"):
        assert await Outage(60, "nats://a").retry(servers.request) == "back"
    assert [record.getMessage().split(" servers=")[0] for record in caplog.records] == logged


async def test_outage_beyond_limit(servers: Servers) -> None:
    with pytest.raises(ConnectError, match="connection refused"):
        await Outage(60, "nats://a").retry(servers.request)
    assert 60 <= servers.now < 63


async def test_outage_begins_with_wait_for_connection(servers: Servers) -> None:
    error = ConnectError("could not be restored within 60 s")
    error.waited = 60
    with pytest.raises(ConnectError, match="within 60 s"):
        await Outage(60, "nats://a").wait(error)
    assert servers.now == 0


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
