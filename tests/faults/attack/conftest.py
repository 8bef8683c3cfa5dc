"""Fixtures of attacks: shorter timeouts, and a proxy to the bucket of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.ordered import consumer
from tests.support.attack_target import attacked
from tests.support.proxy.fault_proxy import Proxy


@pytest.fixture(scope="module")
def proxy(request: pytest.FixtureRequest, shared_server: NatsServer) -> Iterator[Proxy]:
    """A proxy to the module's ``BUCKET`` of ``ROWS`` entries."""
    with attacked(shared_server, request.module.BUCKET, request.module.ROWS) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def short_pong_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a server as lost after 4 s without a PONG, though data arrives, instead of 60 s.

    A payload that never ends must not cost a minute per test.
    A delivery with a forged size takes the following frames, the PONG included, for its payload.
    """
    monkeypatch.setattr(consumer, "_MAX_PONG_TIMEOUT", 4.0)
