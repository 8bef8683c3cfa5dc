"""Bucket names for the tests of batch reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from nats_stream_source.spark.runner import close_cached_runners

_serial = itertools.count(1)


@pytest.fixture
def bucket() -> Iterator[str]:
    """A bucket name of the test's own; closes the cached connections after the test."""
    yield f"b{next(_serial)}"
    close_cached_runners()
