"""Shorter timeouts for attacks: a payload that never ends must not cost a minute per test."""

from __future__ import annotations

import pytest

from nats_stream_source.jetstream.ordered import consumer


@pytest.fixture(autouse=True)
def short_pong_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a server as lost after 4 s without a PONG, though data arrives, instead of 60 s.

    A delivery with a forged size takes the following frames, the PONG included, for its payload.
    """
    monkeypatch.setattr(consumer, "_MAX_PONG_TIMEOUT", 4.0)
