"""Names of streams and buckets."""

from __future__ import annotations

import itertools

import pytest

_names = (f"S{i}" for i in itertools.count())


@pytest.fixture
def name() -> str:
    return next(_names)
