"""Fixtures that several test modules share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from nats_stream_source.connection.connection import select_frame_scanner
from nats_stream_source.embedded import NatsServer
from tests.support.event_loop import LoopOfTest
from tests.support.marks import mark_settings
from tests.support.nats.buckets import api
from tests.support.nats.cluster import Cluster
from tests.support.spark.session import delta_session

# Wall-clock time depends on the other processes of the machine, so it does not decide about a test.
hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")

# Tests of the framer alone use the scanner that NATS_STREAM_SOURCE_SCANNER selects, too.
select_frame_scanner()

# These loggers of pyspark do not propagate, so pytest adds its handlers to them. They make every
# handler that is added write JSON: `caplog.text` would be JSON for all later tests of the process.
for _name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
    setattr(PySparkLogger.getLogger(_name), "addHandler", lambda _handler: None)  # noqa: B010

pytest.register_assert_rewrite("tests.support.spark.scenario")

from tests.support.spark.scenario import Scene  # noqa: E402  (only a module imported after that call is rewritten)


# First: `-m` selects in the same hook, and pytest-xdist reads the groups in it.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that share a Spark session, and group tests for ``--dist loadgroup``.

    pytest-xdist runs all tests of a group in one worker process. The groups of the Spark tests,
    one session in each worker, come first, since they take the longest. Every other module is a
    group, which keeps its module-scoped servers in one worker. A test that takes minutes names a
    group of its own.
    """
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)
        group = item.path.parent.name + "/" + item.path.stem
        if item.get_closest_marker("spark"):
            delta = "spark delta cdc" if "cdc" in item.path.parts else "spark delta"
            group = delta if item.get_closest_marker("delta") else "spark"
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))
    order = {"spark": 0, "spark delta": 1, "spark delta cdc": 2, "spark delta cdc columns": 3}
    items.sort(key=lambda item: order.get(_group(item), len(order)))


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], LoopOfTest]]:
    """The event loop of async tests, one for each test."""
    return {"own": LoopOfTest}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = delta_session()
    yield session
    session.stop()


@pytest.fixture
def nats_server() -> Iterator[NatsServer]:
    """A server of the test's own, for tests that stop it, restart it or look at all of it."""
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="module")
def shared_server() -> Iterator[NatsServer]:
    """A server for all tests of a module, each with buckets of its own: see ``bucket_name``."""
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="module")
def url(shared_server: NatsServer) -> str:
    """The address of the module's server."""
    return shared_server.url


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster for all tests of a module, with the settings of its ``cluster`` mark."""
    with Cluster(**mark_settings(request.node, "cluster")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_streams_of_a_failed_run(request: pytest.FixtureRequest) -> None:
    """Delete the streams that a failed run of this test left, before its rerun (``AGAIN=1``).

    The module's server outlives the failed run. The rerun would find its streams and fail on them.
    """
    if not request.config.getoption("reruns", 0) or "shared_server" not in request.fixturenames:
        return
    url = request.getfixturevalue("shared_server").url
    names = set(api(url, "STREAM.NAMES")["streams"] or ())
    known = request.node.stash.setdefault(_STREAMS_BEFORE, names)
    for name in names - known:
        api(url, f"STREAM.DELETE.{name}")


@pytest.fixture
def scene(spark: SparkSession, shared_server: NatsServer, tmp_path: Path) -> Iterator[Scene]:
    """A scene on the module's server, with a bucket name of its own."""
    yield from _scene(spark, shared_server, tmp_path)


@pytest.fixture
def own_scene(spark: SparkSession, nats_server: NatsServer, tmp_path: Path) -> Iterator[Scene]:
    """A scene with a server of its own."""
    yield from _scene(spark, nats_server, tmp_path)


def _scene(spark: SparkSession, server: NatsServer, directory: Path) -> Iterator[Scene]:
    scene = Scene(spark, server, f"b{next(_serial)}", directory)
    try:
        yield scene
    finally:
        scene.close()


_STREAMS_BEFORE = pytest.StashKey[set[str]]()
_serial = itertools.count(1)
