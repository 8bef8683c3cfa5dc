"""AUTO CDC of a declarative pipeline beside `merge`, with the same events."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from nats_stream_source.delta import merge
from tests.compat.spark.auto_cdc import COLUMNS
from tests.compat.spark.conftest import PLACE
from tests.support.cdc.events import RULES as EVENT_RULES, SCHEMA, SITUATIONS, Event, events_of
from tests.support.delta import rows_of
from tests.support.paths import ROOT
from tests.support.program import ran
from tests.support.spark.daemons import connect_server
from tests.support.spark.session import JAVA_OPTIONS, SMALL

_VERSION = tuple(int(part) for part in pyspark.__version__.split(".")[:2])

pytestmark = [
    pytest.mark.sparks,
    pytest.mark.skipif(
        PLACE != "local" or _VERSION < (4, 3),
        reason="AUTO CDC with SCD type 2 needs Spark 4.3; the test starts a server of its own",
    ),
]
ICEBERG = "iceberg-spark-runtime-4.1_2.13", "1.12.0"
# Iceberg's catalog has views by an interface of Spark 4.1 that is a class in 4.3.
UNVERIFIED = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
RULES = {**EVENT_RULES, "engine": "driver"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "scd1": {},
    "scd2_track_a_b": {"stored_as_scd_type": 2},
    "scd2_track_a": {"stored_as_scd_type": 2, "track_history_column_list": ["a"]},
}
SPECIFICATION = """
name: auto_cdc
storage: {directory}/storage
catalog: lake
database: default
libraries:
  - glob:
      include: transformations/**
configuration:
  events.directory: {directory}/events
"""


def test_merge_has_rows_of_auto_cdc(spark: SparkSession, tmp_path: Path) -> None:
    batches = events()
    expected = by_auto_cdc(tmp_path, batches)
    assert len(expected) == len(batches)
    for number, (batch, after) in enumerate(zip(batches, expected, strict=True)):
        for table, columns in COLUMNS.items():
            path = tmp_path / table
            frame = spark.createDataFrame(list(batch), SCHEMA)
            merge(frame, str(path), **RULES, **ARGUMENTS[table])
            rows = [[row[name] for name in columns] for row in rows_of(DeltaTable(path))]
            assert ordered(rows) == ordered(after[table]), (number, table)
    assert all(len(rows) > 20 for rows in expected[-1].values())


def events() -> list[list[Event]]:
    """Two batches: the situations with unique sequences, and random events of 40 keys."""
    names = [name for name, situation in SITUATIONS.items() if not situation["ties"]]
    first, rest = list[Event](), list[Event]()
    for name in names:
        batches = events_of(name)
        first += batches[0]
        rest += [event for batch in batches[1:] for event in batch]
    rng = random.Random(39)
    for key in range(40):
        for seq in rng.sample(range(1, 30), 8):
            op, a = rng.choice("UUUD"), rng.choice([None, 1, 2])
            rng.choice([first, rest]).append(Event(f"key {key}", seq, op, a, rng.choice("xy")))
    return [first, rest]


def by_auto_cdc(directory: Path, batches: list[list[Event]]) -> list[dict[str, Any]]:
    """The rows of each table after each batch, merged by AUTO CDC into Iceberg."""
    home = Path(pyspark.__file__).parent
    for name in ("events", "transformations", "storage"):
        (directory / name).mkdir()
    flows = Path(__file__).with_name("flows.py")
    shutil.copy(flows, directory / "transformations" / "flows.py")
    (directory / "spark-pipeline.yml").write_text(
        SPECIFICATION.format(directory=directory.as_uri())
    )
    lines = [[event._asdict() for event in batch] for batch in batches]
    (directory / "batches.json").write_text(json.dumps(lines))
    catalog = "spark.sql.catalog.lake"
    settings = {
        **SMALL,
        "spark.driver.extraJavaOptions": f"{JAVA_OPTIONS} {UNVERIFIED}",
        "spark.jars": iceberg_jars(home, directory),
        catalog: "IcebergTables",
        f"{catalog}.type": "hadoop",
        f"{catalog}.warehouse": f"{directory}/warehouse",
        "spark.sql.defaultCatalog": "lake",
    }
    environment = {**os.environ, "SPARK_HOME": str(home), "PYTHONPATH": str(ROOT)}
    with connect_server(home, directory, settings, environment) as url:
        program = (sys.executable, "-m", "tests.compat.spark.auto_cdc.program", directory)
        ran(*program, environment=environment, timeout=900, SPARK_REMOTE=url)
    rows: list[dict[str, Any]] = json.loads((directory / "rows.json").read_text())
    return rows


def iceberg_jars(home: Path, directory: Path) -> str:
    """The jars of Iceberg's runtime, and of its catalog for this Spark."""
    missing = [program for program in ("mvn", "javac", "jar") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"Iceberg's jar comes from Maven: {missing[0]} was not found")
    name, version = ICEBERG
    maven = ["mvn", "-q", "-B", "dependency:copy", f"-DoutputDirectory={directory}"]
    artifact = f"-Dartifact=org.apache.iceberg:{name}:{version}"
    if subprocess.run([*maven, artifact], timeout=600).returncode:
        pytest.skip("Maven did not fetch Iceberg's jar")
    runtime, classes = directory / f"{name}-{version}.jar", directory / "classes"
    source, path = Path(__file__).with_name("IcebergTables.java"), f"{runtime}:{home}/jars/*"
    javac = ["javac", "-nowarn", "-proc:none", "-cp", path, "-d", str(classes), str(source)]
    subprocess.run(javac, check=True, timeout=300)
    catalog = directory / "catalog.jar"
    subprocess.run(["jar", "cf", str(catalog), "-C", str(classes), "."], check=True, timeout=60)
    return f"{runtime},{catalog}"


def ordered(rows: list[list[Any]]) -> list[list[Any]]:
    """Rows by key, and by start or sequence."""
    return sorted(rows, key=lambda row: row[:2])
