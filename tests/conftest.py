"""Fixtures that several test modules share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from spark_session import delta_session

from nats_stream_source.embedded import NatsServer

pytest.register_assert_rewrite("scenario")

from scenario import Scene  # noqa: E402  (only a module imported after that call is rewritten)


# First: `-m` selects in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares the Spark session is marked, so that all else can run beside it."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)


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


_serial = itertools.count(1)
