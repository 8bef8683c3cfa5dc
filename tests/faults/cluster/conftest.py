"""The cluster of a test that needs its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.marks import mark_settings
from tests.support.nats.cluster import Cluster


@pytest.fixture
def own_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster for one test, which replaces the stores of its servers."""
    with Cluster(**mark_settings(request.node, "cluster")) as cluster:
        yield cluster
