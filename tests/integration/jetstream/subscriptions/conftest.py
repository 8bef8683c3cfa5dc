"""Streams of the tests of subscriptions."""

from __future__ import annotations

import pytest

from tests.support.nats.subscriptions import make_stream


@pytest.fixture
def stream(url: str) -> str:
    """An empty stream."""
    return make_stream(url)


@pytest.fixture
def published(url: str) -> str:
    return make_stream(url, 5)
