"""The Spark session of the place that ``SPARK_PLACE`` names, and scenes in it."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from scenario import Scene

from nats_stream_source import register
from nats_stream_source.embedded import NatsServer

PLACE = os.environ.get("SPARK_PLACE", "local")
"""``local``, ``standalone`` (this is a driver that ``spark-submit`` started) or ``connect``.

``SPARK_SERVER`` is the address of the Spark Connect server, if there is one.
"""

_serial = itertools.count(1)


@pytest.fixture(scope="session")
def place() -> str:
    return PLACE


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    if PLACE == "connect":
        session = SparkSession.builder.remote(os.environ["SPARK_SERVER"]).getOrCreate()
    else:
        builder = SparkSession.builder.appName("nats-stream-source on each Spark")
        if PLACE == "local":
            os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
            builder = builder.master("local[2]")
            for name, value in SETTINGS.items():
                builder = builder.config(name, value)
        warehouse = str(tmp_path_factory.mktemp("warehouse"))
        session = builder.config("spark.sql.warehouse.dir", warehouse).getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
    if PLACE == "standalone":
        # Found by name, a format has nothing of what Spark ships (docs/cluster.md).
        register(session)
    yield session
    session.stop()


SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
}


@pytest.fixture
def scene(spark: SparkSession, shared_server: NatsServer, tmp_path: Path) -> Iterator[Scene]:
    """A scene on the module's server, with a name of its own."""
    kind: type[Scene] = Scene
    if PLACE == "connect":
        from file_scene import FileScene

        kind = FileScene
    scene = kind(spark, shared_server, f"b{next(_serial)}", tmp_path)
    try:
        yield scene
    finally:
        scene.close()
