"""README's program and the programs of `examples/` run and print what their pages show."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyspark
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from examples import alerts, copy_bucket, enrich, history
from examples.postgres.engine import build
from examples.postgres.local_postgres import MissingProgramError, server_programs
from nats_stream_source import register
from nats_stream_source.embedded import NatsServer
from tests.support.delta import rows_of
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.paths import ROOT
from tests.support.program import ran
from tests.support.spark.session import LOCAL, program_environment

README = (ROOT / "README.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
STARTED = (ROOT / "docs/getting-started.md").read_text()
(VIEW,) = re.findall(r"```sql\n(.*?)```", STARTED, re.DOTALL)
SERVER = "nats://127.0.0.1:4222"
ROWS = [("plane.1", b"JFK", 3), ("plane.2", b"IAH", 2)]


@pytest.fixture
def url(nats_server: NatsServer) -> str:
    create_bucket(nats_server.url, "fleet", 5)
    put_many(nats_server.url, "fleet", [("plane.1", b"EWR"), ("plane.2", b"IAH")])
    put_many(nats_server.url, "fleet", [("plane.1", b"JFK")])
    return nats_server.url


def program(url: str, lake: Path) -> str:
    """The program for another server and directory, which ends when it has read all entries."""
    changed = PROGRAM.replace(SERVER, url).replace('"lake/', f'"{lake}/')
    lines = changed.replace(".awaitTermination()", "").splitlines()
    lines[-1] = f"query = {lines[-1]}"
    return "\n".join([*lines, "query.processAllAvailable()", "query.stop()", ""])


def rows(lake: Path) -> list[tuple[Any, ...]]:
    names = ("key", "value", "revision")
    table = rows_of(DeltaTable(str(lake / "fleet")))
    return sorted(tuple(row[name] for name in names) for row in table)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120
    assert len(PROGRAM.strip().splitlines()) <= 10


@pytest.mark.usefixtures("spark")
def test_program_merges_bucket(url: str, tmp_path: Path) -> None:
    exec(program(url, tmp_path), {})
    assert rows(tmp_path) == ROWS


@pytest.mark.faults
def test_program_runs_by_spark_submit_and_view_by_spark_sql(url: str, tmp_path: Path) -> None:
    environment = program_environment(tmp_path / "conf")
    # From the archive that the programs add to the path; the package is installed otherwise.
    environment |= {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    programs = Path(str(pyspark.__file__)).parent / "bin"
    settings = [part for name, value in LOCAL.items() for part in ("--conf", f"{name}={value}")]
    job = tmp_path / "job.py"
    job.write_text(program(url, tmp_path))
    printed = []
    for command in (
        ["spark-submit", "--master", "local[*]", *settings, str(job)],
        ["spark-sql", *settings, "-e", VIEW.replace(SERVER, url)],
    ):
        done = ran(programs / command[0], *command[1:], cwd=tmp_path, environment=environment)
        printed.append(done.stdout)
    assert rows(tmp_path) == ROWS
    assert "plane.1\tJFK\t3\nplane.2\tIAH\t2\n" in printed[1]


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


CHECKPOINTS = ROOT / "checkpoints_example"


def offsets(checkpoint: Path) -> list[dict[str, Any]]:
    files = sorted((checkpoint / "offsets").glob("[0-9]*"), key=lambda file: int(file.name))
    return [json.loads(file.read_text().splitlines()[2]) for file in files]


@pytest.fixture(scope="module")
def example_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the example prints, and the checkpoint that it leaves."""
    checkpoint = tmp_path_factory.mktemp("example") / "checkpoint"
    environment = program_environment(checkpoint.with_name("conf"))
    done = ran(sys.executable, CHECKPOINTS / "run.py", checkpoint, environment=environment)
    assert done.stderr == ""
    return done.stdout, checkpoint


def section(printed: str, number: int) -> list[str]:
    """The indented lines under one of the example's numbered headings."""
    text = re.split(r"^\d\. .*\n", printed, flags=re.MULTILINE)[number]
    return [line.strip() for line in text.splitlines()]


def test_printed_sections(example_run: tuple[str, Path]) -> None:
    first, resumed, files, replayed, lag = (
        section(example_run[0], number) for number in range(1, 6)
    )
    assert first == ["batch 0: revision 1 PUT pump on", "batch 0: revision 2 PUT fan off"]
    assert resumed == [
        "batch 1: revision 3 PUT pump off",
        "batch 1: revision 4 DEL fan None",
        "batch 1: revision 5 PUT door open",
    ]
    shown = [line.partition(":")[0] for line in files]
    assert shown == ["commits/0", "commits/1", "metadata", "offsets/0", "offsets/1"]
    assert [int(line.split()[3]) for line in replayed] == [2, 3, 4, 5]
    behind = [line for line in lag if line.endswith("behind")]
    assert [re.sub(r", [\d.]+ s", "", line) for line in behind] == [
        f"batch {number}: {rows} rows behind" for number, rows in enumerate((3, 1, 0))
    ]


def test_sample_equals_current_checkpoint(example_run: tuple[str, Path]) -> None:
    fixed = ("stream", "epoch", "origin", "stream_seq", "consumer_seq", "initial_through", "filter")
    sample, today = (
        [[offset[name] for name in fixed] for offset in offsets(checkpoint)]
        for checkpoint in (CHECKPOINTS / "checkpoint", example_run[1])
    )
    assert sample == today
    assert all(
        offset["time"] and offset["created"] for offset in offsets(CHECKPOINTS / "checkpoint")
    )


def test_readme_shows_sample_and_explains_every_field() -> None:
    readme = (CHECKPOINTS / "README.md").read_text()
    sample = json.loads((CHECKPOINTS / "checkpoint/offsets/1").read_text().splitlines()[2])
    (shown,) = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    assert json.loads(shown) == sample
    assert sample.keys() <= set(re.findall(r"`(\w+)`", readme))
