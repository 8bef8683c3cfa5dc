"""Buckets of the tests of the planner."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import create_bucket, put_many


@pytest.fixture
def ten(nats_server: NatsServer) -> str:
    """The address of a server whose bucket ``b`` has ten entries, one a key."""
    create_bucket(nats_server.url, "b")
    put_many(nats_server.url, "b", ((f"k{i}", b"v") for i in range(10)))
    return nats_server.url
