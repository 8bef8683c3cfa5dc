"""The clusters of the cluster fault tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.marks import mark_settings
from tests.support.nats.cluster import Cluster
from tests.support.nats.watched_cluster import WatchedCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three servers for all tests of a module."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def watched_cluster(request: pytest.FixtureRequest) -> Iterator[WatchedCluster]:
    """A watched cluster for all tests of a module, with the settings of its ``cluster`` mark."""
    with WatchedCluster(**mark_settings(request.node, "cluster")) as cluster:
        yield cluster


@pytest.fixture
def own_cluster(request: pytest.FixtureRequest) -> Iterator[WatchedCluster]:
    """A watched cluster for one test, which replaces the stores of its servers."""
    with WatchedCluster(**mark_settings(request.node, "cluster")) as cluster:
        yield cluster
