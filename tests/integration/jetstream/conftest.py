"""The connection of the tests of JetStream."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from tests.support.event_loop import cancelled_after
from tests.support.nats.subscriptions import DEADLINE


@pytest.fixture
async def jetstream(url: str) -> AsyncIterator[JetStream]:
    """JetStream over a connection of its own; the test fails when it takes too long."""
    with cancelled_after(2 * DEADLINE):
        async with connect(url) as jetstream:
            yield jetstream
