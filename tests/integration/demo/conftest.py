"""The NATS server of the demo's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nats_stream_source.embedded import NatsServer


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """A server for all tests of a module."""
    with NatsServer() as nats_server:
        yield nats_server
