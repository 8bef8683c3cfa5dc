"""The programs of `examples/` run from first line to last; their assertions compare the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pyspark.sql import SparkSession

from examples import alerts, copy_bucket, enrich, history
from examples.postgres.engine import build
from examples.postgres.local_postgres import MissingProgramError, server_programs
from nats_stream_source import register
from nats_stream_source.embedded import NatsServer
from tests.support.paths import ROOT
from tests.support.program import ran

own_session = pytest.mark.faults  # slow: starts a Spark session of its own

EXAMPLES = ROOT / "examples"


def run(program: list[str], directory: Path) -> None:
    ran(sys.executable, *program, cwd=directory, PYTHONPATH=str(ROOT))


@pytest.mark.parametrize(
    "example", [copy_bucket, history, alerts, enrich], ids=lambda one: one.__name__
)
def test_example_runs(
    example: ModuleType, spark: SparkSession, nats_server: NatsServer, tmp_path: Path
) -> None:
    register(spark, check=False)
    example.main(spark, nats_server.url, tmp_path)


@own_session
def test_example_runs_as_program(tmp_path: Path) -> None:
    run(["-m", "examples.copy_bucket"], tmp_path)


@own_session
@pytest.mark.delta
def test_notebook_runs(tmp_path: Path) -> None:
    """Headless, with a kernel of this Python; its own assertions compare table and bucket."""
    pytest.importorskip("nbclient", reason="the extra `dev` installs it")
    pytest.importorskip("ipykernel", reason="the extra `dev` installs it")
    written = tmp_path / "follow_a_bucket.ipynb"
    written.write_text((EXAMPLES / "follow_a_bucket.ipynb").read_text())
    execute = "from nbclient.cli import main; main()"
    run(["-c", execute, "--inplace", "--timeout=300", str(written)], tmp_path)
    cells = json.loads(written.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    shown = "".join("".join(output.get("text", [])) for output in outputs)
    assert "|airport|revision|" in shown
    assert "then|now" in shown


def test_notebook_is_stored_without_outputs() -> None:
    cells = json.loads((EXAMPLES / "follow_a_bucket.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@own_session
def test_postgres_table_followed(tmp_path: Path) -> None:
    try:
        server_programs()
        build(tmp_path / "engine")
    except MissingProgramError as error:
        pytest.skip(str(error))
    run(["-m", "examples.postgres", "--target", str(tmp_path / "engine")], tmp_path)


@own_session
def test_pipeline_updated_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program compares the view with the bucket."""
    monkeypatch.setenv("SPARK_TESTING", "0")  # a free port for the Connect server
    run(["-m", "examples.pipeline"], tmp_path)


@own_session
def test_lag_plot_is_drawn(tmp_path: Path) -> None:
    run([str(EXAMPLES / "plot_lag.py"), "lag.svg", "--phase", "1"], tmp_path)
    assert "query stopped" in (tmp_path / "lag.svg").read_text()
