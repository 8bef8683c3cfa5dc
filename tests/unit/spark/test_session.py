"""The settings of a session for small micro-batches, and garbage collection in its workers."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession

from nats_stream_source import configure
from nats_stream_source.delta import configure as configure_of_delta
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.spark import readers, session
from nats_stream_source.spark.readers import exempt_modules

SOCKETS = "spark.python.unix.domain.socket.enabled"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYSPARK_PYTHON", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.setenv(name, "")  # restored at the end, also if it was not set
        monkeypatch.delenv(name)


def test_settings_are_added_to_builder() -> None:
    builder = SparkSession.Builder().config("spark.app.name", "fleet").config("a", "b")
    assert configure(builder) is builder
    assert builder._options == {"spark.app.name": "fleet", "a": "b", SOCKETS: "true"}
    assert configure_of_delta is configure


def test_delta_adds_its_settings() -> None:
    plain = configure(SparkSession.Builder())._options
    added = configure(SparkSession.Builder(), delta=True)._options
    assert added.items() > plain.items()
    assert added.keys() - plain.keys() == {*session.DELTA_SETTINGS, "spark.jars.packages"}


@pytest.mark.parametrize("home", [None, "/no/such/jdk"])
def test_missing_java_is_named(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/no/such/directory")
    monkeypatch.setenv("JAVA_HOME", home or "")
    if home is None:
        monkeypatch.delenv("JAVA_HOME")
    with pytest.raises(ConfigurationError, match=f"{home or 'PATH'}.* install .*openjdk-17"):
        configure(SparkSession.Builder())
    configure(SparkSession.Builder().remote("sc://spark.example.com"))
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1234")
    configure(SparkSession.Builder())


@pytest.mark.parametrize("master", [None, "local", "local[2]"])
def test_local_workers_get_python_of_program(master: str | None) -> None:
    builder = SparkSession.Builder()
    configure(builder if master is None else builder.master(master))
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_python_of_workers_stays_if_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/python3.12")
    configure(SparkSession.Builder())
    assert os.environ["PYSPARK_PYTHON"] == "/usr/bin/python3.12"


@pytest.mark.parametrize(
    ("master", "port"), [("spark://master:7077", None), ("yarn", None), (None, "1234")]
)
def test_python_of_cluster_and_spark_submit_stays(
    master: str | None, port: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if port is not None:
        monkeypatch.setenv("PYSPARK_GATEWAY_PORT", port)
    builder = SparkSession.Builder()
    configure(builder if master is None else builder.master(master))
    assert "PYSPARK_PYTHON" not in os.environ


def _classic(**started: str) -> Any:
    """A session of a JVM that was started with these settings, which a later one cannot change."""
    conf = SimpleNamespace(getAll=lambda: [*started.items()])
    return SimpleNamespace(_jvm=object(), sparkContext=SimpleNamespace(getConf=lambda: conf))


def test_missing_settings_are_those_of_started_jvm() -> None:
    assert session.missing_settings(_classic()) == {SOCKETS: "true"}
    assert session.missing_settings(_classic(**{SOCKETS: "false"})) == {SOCKETS: "true"}
    assert session.missing_settings(_classic(**{SOCKETS: "true"})) == {}


def test_missing_settings_of_connect_are_those_of_its_server() -> None:
    def connect(**settings: str) -> Any:
        get = lambda name, default: settings.get(name, default)  # noqa: E731
        return SimpleNamespace(conf=SimpleNamespace(get=get))

    assert session.missing_settings(connect()) == {SOCKETS: "true"}
    assert session.missing_settings(connect(**{SOCKETS: "true"})) == {}


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(readers, "_frozen", 0)
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("in_task", [True, False])
def test_worker_modules_are_exempt(monkeypatch: pytest.MonkeyPatch, in_task: bool) -> None:
    """With what the first task added, and not in a process that is not a worker."""
    # TaskContext() would make itself the one of this process, and stay.
    context = object.__new__(TaskContext) if in_task else None
    monkeypatch.setattr(TaskContext, "_taskContext", context)
    exempt_modules()
    assert (gc.get_freeze_count() > 10_000) is in_task
    tracked = []
    for _ in range(2):
        tracked.append([[] for _ in range(1000)])
        exempt_modules()
    collectable = {id(one) for one in gc.get_objects()}
    exempt = [all(id(one) not in collectable for one in added) for added in tracked]
    assert exempt == [in_task, False]
