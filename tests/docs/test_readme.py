"""README's first code runs as it stands, and prints what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import Row, SparkSession

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.paths import ROOT
from tests.support.spark.session import LOCAL, program_environment

README = (ROOT / "README.md").read_text()
PROGRAM, BATCH, DELTA, WRITING, _ASYNCIO = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(VIEW,) = re.findall(r"```sql\n(.*?)```", README, re.DOTALL)
SERVER = "nats://127.0.0.1:4222"
SHOWN = [r"\|plane.1\| +JFK\| +3\|", r"\|plane.2\| +IAH\| +2\|"]


@pytest.fixture
def url(nats_server: NatsServer) -> str:
    create_bucket(nats_server.url, "fleet", 5)
    put_many(nats_server.url, "fleet", [("plane.1", b"EWR"), ("plane.2", b"IAH")])
    put_many(nats_server.url, "fleet", [("plane.1", b"JFK")])
    return nats_server.url


@pytest.fixture
def views(spark: SparkSession) -> Iterator[None]:
    yield
    for name in ("fleet", "entries", "printed"):
        spark.catalog.dropTempView(name)


@pytest.mark.usefixtures("views")
def test_the_blocks(spark: SparkSession, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the shared session, whose standard output a test does not see."""
    query = PROGRAM.replace(SERVER, url).replace(".awaitTermination()", "")
    query = query.replace('.format("console")', '.format("memory").queryName("printed")')
    query = query.replace("entries.writeStream", "query = entries.writeStream")
    names: dict[str, Any] = {}
    exec(query, names)
    try:
        names["query"].processAllAvailable()
    finally:
        names["query"].stop()
    printed = spark.sql("SELECT * FROM printed ORDER BY key").collect()
    assert [tuple(row) for row in printed] == [
        ("plane.1", "JFK", 3, "PUT"),
        ("plane.2", "IAH", 2, "PUT"),
    ]
    exec(BATCH.replace(SERVER, url), names)
    assert_shown(capsys.readouterr().out)
    create, select = VIEW.replace(SERVER, url).strip().rstrip(";").split(";")
    spark.sql(create)
    assert spark.sql(select).collect() == [
        Row(key="plane.1", value="JFK", revision=3),
        Row(key="plane.2", value="IAH", revision=2),
    ]
    exec(WRITING.replace(SERVER, url), names)
    exec(BATCH.replace(SERVER, url), names)
    assert re.search(r"\|plane.3\| +LAX\| +4\|", capsys.readouterr().out)


def assert_shown(output: str) -> None:
    for line in SHOWN:
        assert re.search(line, output), output


@pytest.mark.faults
@pytest.mark.delta
def test_the_delta_block(spark: SparkSession, url: str, tmp_path: Path) -> None:
    example = DELTA.replace(SERVER, url).replace("/lake/", f"{tmp_path}/")
    names: dict[str, Any] = {"spark": spark}
    exec(example.replace("\n(\n", "\nquery = (\n"), names)
    try:
        names["query"].processAllAvailable()
    finally:
        names["query"].stop()
    rows = spark.read.format("delta").load(str(tmp_path / "fleet")).orderBy("key").collect()
    assert [(row.key, bytes(row.value)) for row in rows] == [
        ("plane.1", b"JFK"),
        ("plane.2", b"IAH"),
    ]


@pytest.mark.faults
def test_spark_submit_and_spark_sql(url: str, tmp_path: Path) -> None:
    """The programs of pyspark, with the first block as a file and the view as a statement."""
    environment = program_environment(tmp_path / "conf")
    # From the archive that the programs add to the path; the package is installed otherwise.
    environment |= {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    programs = Path(str(pyspark.__file__)).parent / "bin"
    settings = [part for name, value in LOCAL.items() for part in ("--conf", f"{name}={value}")]
    job = tmp_path / "job.py"
    job.write_text(
        PROGRAM.replace(SERVER, url).replace("awaitTermination()", "processAllAvailable()")
    )
    for command in (
        ["spark-submit", "--master", "local[*]", *settings, str(job)],
        ["spark-sql", *settings, "-e", VIEW.replace(SERVER, url)],
    ):
        done = subprocess.run(
            [programs / command[0], *command[1:]],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if command[0] == "spark-submit":
            assert_shown(done.stdout)
        else:
            assert "plane.1\tJFK\t3\nplane.2\tIAH\t2\n" in done.stdout
