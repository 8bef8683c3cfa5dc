"""Outages: what is repeated, for how long, and what is logged."""

from __future__ import annotations

import logging

import pytest

from nats_stream_source.errors import (
    AuthorizationError,
    ConnectError,
    ConsumerLimitError,
    NatsSourceError,
    RequestTimeoutError,
)
from nats_stream_source.jetstream.retry import Outage

AWAY = ConnectError("connection refused")


class Servers:
    """Servers that come back at a time, by a clock of its own."""

    def __init__(self, back_at: float, error: NatsSourceError = AWAY) -> None:
        self.now = 0.0
        self.back_at = back_at
        self.error = error
        self.calls = 0

    async def request(self) -> str:
        self.calls += 1
        self.now += 0.5
        if self.now < self.back_at:
            raise self.error
        return "back"

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def outage(self, timeout: float) -> Outage:
        return Outage(timeout, "nats://a", self.clock, self.sleep)


async def test_outage_within_limit(caplog: pytest.LogCaptureFixture) -> None:
    servers = Servers(back_at=35)
    with caplog.at_level(logging.WARNING, "nats_stream_source"):
        assert await servers.outage(60).retry(servers.request) == "back"
    texts = [record.getMessage().split(" servers=")[0] for record in caplog.records]
    assert texts == [
        "servers are away, waiting",
        *["servers are still away"] * 3,
        "servers are back",
    ]


async def test_outage_absent_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    servers = Servers(back_at=0)
    with caplog.at_level(logging.WARNING, "nats_stream_source"):
        assert await servers.outage(60).retry(servers.request) == "back"
    assert not caplog.records


async def test_outage_beyond_limit() -> None:
    servers = Servers(back_at=100)
    with pytest.raises(ConnectError, match="connection refused"):
        await servers.outage(60).retry(servers.request)
    assert 60 <= servers.now < 63


async def test_outage_spans_several_requests() -> None:
    servers = Servers(back_at=100)
    outage = servers.outage(60)
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
async def test_errors_of_other_kinds_are_raised_at_once(error: NatsSourceError) -> None:
    servers = Servers(back_at=100, error=error)
    with pytest.raises(type(error)):
        await servers.outage(60).retry(servers.request)
    assert servers.calls == 1


async def test_stream_without_leader() -> None:
    servers = Servers(back_at=20, error=RequestTimeoutError("no response"))
    outage = servers.outage(60)
    assert await outage.retry(servers.request, ends=False) == "back"
    servers.back_at = 100
    with pytest.raises(RequestTimeoutError):
        await outage.retry(servers.request)
    assert servers.now < 63, "the connection is back, the stream is not: the outage continues"
