"""Bucket names for the tests of batch reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nats_stream_source.spark.runner import close_cached_runners


@pytest.fixture
def bucket(name: str) -> Iterator[str]:
    """A bucket name of the test's own; closes the cached connections after the test."""
    yield name
    close_cached_runners()
