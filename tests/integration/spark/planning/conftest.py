"""Servers and buckets of the tests of the planner."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import fill_bucket


@pytest.fixture
def url(nats_server: NatsServer) -> str:
    """The address of a server of the test's own."""
    return nats_server.url


@pytest.fixture
def ten(url: str) -> str:
    """The address of a server whose bucket ``b`` has ten entries, one a key."""
    fill_bucket(url, "b", ((f"k{i}", b"v") for i in range(10)))
    return url
