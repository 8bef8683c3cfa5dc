"""A bucket that the tests of the ordered reader read."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import create_bucket, put_many


@pytest.fixture
def filled(nats_server: NatsServer) -> NatsServer:
    """A server with the bucket ``b``: 3,000 revisions of 1 KB, no history limit in the way."""
    create_bucket(nats_server.url, "b", history=64)
    put_many(nats_server.url, "b", ((f"k{i % 100}", b"%d" % i + b"x" * 1000) for i in range(3000)))
    return nats_server
