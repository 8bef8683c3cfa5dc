"""Fixtures of the tests of subscriptions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from tests.support.event_loop import cancelled_after
from tests.support.nats.subscriptions import DEADLINE, make_stream


@pytest.fixture
async def jetstream(url: str) -> AsyncIterator[JetStream]:
    """JetStream over a connection of its own; the test fails when it takes too long."""
    with cancelled_after(2 * DEADLINE):
        async with connect(url) as jetstream:
            yield jetstream


@pytest.fixture
def stream(url: str) -> str:
    """An empty stream."""
    return make_stream(url)


@pytest.fixture
def published(url: str) -> str:
    return make_stream(url, 5)
