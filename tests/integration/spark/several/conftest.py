"""The server of the tests of several streams."""

from __future__ import annotations

import pytest

from nats_stream_source.embedded import NatsServer


@pytest.fixture
def url(nats_server: NatsServer) -> str:
    """The address of a server of the test's own, all of which a pattern can match."""
    return nats_server.url
