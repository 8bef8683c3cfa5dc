"""``register`` starts a worker of a real Spark; the event loop that runs only while Spark calls."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import py4j
import pyspark
import pytest
from pyspark.sql import SparkSession

from nats_stream_source import __version__, register
from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.errors import WorkerPythonError
from nats_stream_source.spark.runner import Runner, cached_runner, close_cached_runners
from nats_stream_source.spark.worker_check import start_failure, verify

ADVICE = "set PYSPARK_PYTHON, or spark.pyspark.python, to a Python that has the package"


@pytest.fixture
def python_with_spark_only(tmp_path: Path) -> str:
    """A Python that starts Spark's workers and has no other package."""
    for module in (pyspark, py4j):
        (tmp_path / module.__name__).symlink_to(Path(str(module.__file__)).parent)
    program = tmp_path / "python"
    # Python's option -m adds the directory of the process, which is a clone in tests.
    run = f'cd / && PYTHONPATH={tmp_path} exec {sys.executable} -S "$@"'
    program.write_text(f"#!/bin/sh\n{run}\n")
    program.chmod(0o755)
    return str(program)


def refusal(spark: SparkSession) -> str:
    with pytest.raises(WorkerPythonError) as caught:
        register(spark)
    text = str(caught.value)
    assert ADVICE in text
    assert "\n" not in text
    return text


def test_driver_python_is_accepted(spark: SparkSession) -> None:
    register(spark)


def test_python_without_package(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, python_with_spark_only: str
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", python_with_spark_only)
    text = refusal(spark)
    assert f"{sys.executable} (Python " in text
    assert "lacks nats-stream-source, nats-py, pyarrow, numpy; install it" in text
    # Unchecked it is accepted, in a session of its own: the formats of a session keep this Python.
    register(spark.newSession(), check=False)


def test_python_missing(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/nowhere/python")
    assert 'Cannot run program "/nowhere/python"' in refusal(spark)


def test_python_without_spark(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As ``/usr/bin/python3`` where Spark is a pip package of a virtual environment."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(program))
    assert "No module named 'pyspark'" in refusal(spark)


def test_python_of_other_version(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonVer", "3.2")
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"Python in worker has different version: {own} than that in driver: 3.2" in refusal(
        spark
    )


def test_package_of_other_version() -> None:
    worker = {"executable": "python3", "python": "3.11.7", "package": "0.0.9", "missing": []}
    with pytest.raises(WorkerPythonError, match=rf"0\.0\.9, expected {__version__} as in the dri"):
        verify(worker, __version__)


def test_failures_of_other_kinds_do_not_blame_python() -> None:
    assert start_failure("Job aborted due to stage failure: executor lost") is None


NOWHERE = ConnectionSettings(servers=("nats://127.0.0.1:1",))


def interrupt() -> None:
    raise KeyboardInterrupt


def test_interrupt_ends_task_first() -> None:
    """A task that was left unfinished would continue at the next use of the loop."""
    runner = Runner(NOWHERE)
    seen: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(interrupt)
        try:
            await asyncio.sleep(60)
            seen.append("slept")
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    async def next_work() -> str:
        return "next"

    with pytest.raises(KeyboardInterrupt):
        runner.run(work())
    assert seen == ["cleaned up"]
    assert runner.run(next_work()) == "next"
    runner.close()


def test_iterate_closes_what_it_iterates() -> None:
    runner = Runner(NOWHERE)
    seen: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            await asyncio.sleep(0)
            seen.append("closed")

    items = runner.iterate(numbers())
    assert [next(items), next(items)] == [0, 1]
    items.close()
    assert seen == ["closed"]
    assert list(runner.iterate(numbers())) == list(range(10))
    runner.close()
    runner.close()  # again is nothing


def test_runner_is_kept_for_each_setting(url: str) -> None:
    here = ConnectionSettings(servers=(url,))
    runner = cached_runner(here)
    assert cached_runner(here) is runner
    assert cached_runner(NOWHERE) is not runner
    first = runner.run(runner.connection.connection())
    assert runner.run(runner.connection.connection()) is first
    close_cached_runners()
    assert first.client.is_closed
    assert cached_runner(here) is not runner
    close_cached_runners()
