"""``register`` starts a Python worker of a real Spark, and names the setting to change."""

from __future__ import annotations

import sys
from pathlib import Path

import py4j
import pyspark
import pytest
from pyspark.sql import SparkSession

from nats_stream_source import __version__, register
from nats_stream_source.errors import WorkerPythonError
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
