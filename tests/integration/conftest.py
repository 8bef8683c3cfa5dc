"""The cluster of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.marks import mark_settings
from tests.support.nats.cluster import Cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster for all tests of a module, with the settings of its ``cluster`` mark."""
    with Cluster(**mark_settings(request.node, "cluster")) as cluster:
        yield cluster
