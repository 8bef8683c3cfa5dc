"""README's program runs as it stands, in a session and by ``spark-submit``; ``spark-sql`` too."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest
from deltalake import DeltaTable

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
    changed = PROGRAM.replace(SERVER, url).replace('"/lake/', f'"{lake}/')
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
