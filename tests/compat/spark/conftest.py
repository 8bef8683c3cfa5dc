"""The Spark session of the place that ``SPARK_PLACE`` names, and scenes in it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from nats_stream_source import register
from nats_stream_source.embedded import NatsServer
from nats_stream_source.spark.session import ADMISSION_CONTROL
from tests.support.spark.scenario import Scene
from tests.support.spark.session import SMALL, configured

PLACE = os.environ.get("SPARK_PLACE", "local")
"""``local``, ``standalone`` (this is a driver that ``spark-submit`` started) or ``connect``.

``SPARK_SERVER`` is the address of the Spark Connect server, if there is one.
"""

_serial = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not ADMISSION_CONTROL:
        # PySpark 4.0 and 4.1 leave the sockets of `collect` to the garbage collector.
        ignore = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
        for item in items:
            item.add_marker(ignore)


@pytest.fixture(scope="session")
def place() -> str:
    return PLACE


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    if PLACE == "connect":
        session = SparkSession.builder.remote(os.environ["SPARK_SERVER"]).getOrCreate()
    else:
        builder = configured(SMALL) if PLACE == "local" else SparkSession.builder
        builder = builder.appName("nats-stream-source on each Spark")
        warehouse = str(tmp_path_factory.mktemp("warehouse"))
        session = builder.config("spark.sql.warehouse.dir", warehouse).getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
    if PLACE == "standalone":
        # Found by name, a format has nothing of what Spark ships (docs/cluster.md).
        register(session)
    yield session
    session.stop()


@pytest.fixture
def scene(spark: SparkSession, shared_server: NatsServer, tmp_path: Path) -> Iterator[Scene]:
    kind: type[Scene] = Scene
    if PLACE == "connect":
        from tests.compat.spark.file_scene import FileScene

        kind = FileScene
    scene = kind(spark, shared_server, f"b{next(_serial)}", tmp_path)
    try:
        yield scene
    finally:
        scene.close()
