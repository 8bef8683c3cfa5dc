"""Fixtures of the tests of subscriptions."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.nats.subscriptions import make_stream


@pytest.fixture
def published(shared_server: NatsServer) -> str:
    return make_stream(shared_server.url, 5)
