"""``examples/pipeline`` on each Spark with limits for Python sources: an update that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from examples.pipeline.__main__ import entries, view
from examples.pipeline.project import prepare, start_update, update
from nats_stream_source.spark.session import ADMISSION_CONTROL
from tests.compat.spark.conftest import PLACE
from tests.support.nats.buckets import DEL, create_bucket, publish
from tests.support.nats.streams import create_stream
from tests.support.spark.session import program_environment
from tests.support.wait import wait_until

pytestmark = [
    pytest.mark.sparks,
    pytest.mark.skipif(
        PLACE != "local" or not ADMISSION_CONTROL,
        reason="a pipeline starts a Spark of its own, and its limits need Spark 4.2",
    ),
]

CHANGES = 600
ROWS = 50


def test_update_killed_and_repeated(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change is once in the streaming table, and the view equals the bucket."""
    environment = {**program_environment(tmp_path / "conf"), "MAX_ROWS": str(ROWS)}
    environment["SPARK_TESTING"] = "0"  # a free port for the Connect server of each update
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    create_bucket(url, "fleet", 64)
    create_stream(url, "REPORTS", "report")
    publish(
        url,
        (
            (f"$KV.fleet.plane.{number % 40}", b"" if number % 7 == 6 else b"EWR", deleted)
            for number in range(CHANGES)
            for deleted in [DEL if number % 7 == 6 else None]
        ),
    )
    delays = [{"plane": f"plane.{number}", "delay": number} for number in range(120)]
    publish(url, (("report", json.dumps(delay).encode(), None) for delay in delays))
    spec = prepare(tmp_path)
    checkpoint = tmp_path / "storage/_checkpoints/spark_catalog/default/fleet_changes"

    def committed() -> int:
        return len(list(checkpoint.glob("*/*/commits/[0-9]*")))

    process = start_update(spec, url)
    log = tmp_path / "pipeline.log"
    wait_until(lambda: committed() >= 2, "two micro-batches", 600, seen=lambda: log.read_text())
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert committed() < CHANGES / ROWS
    update(spec, url)

    changes = spark.read.parquet(str(tmp_path / "spark-warehouse/fleet_changes"))
    assert sorted(row.revision for row in changes.collect()) == list(range(1, CHANGES + 1))
    reports = spark.read.parquet(str(tmp_path / "spark-warehouse/reports"))
    assert sorted(row.sequence for row in reports.collect()) == list(range(1, 121))
    bucket = asyncio.run(entries(url, "fleet"))
    assert {row["plane"]: row["airport"] for row in view(tmp_path, "fleet")} == bucket
    late = {f"plane.{number}.{number + 1}": str(number) for number in range(60, 120)}
    assert asyncio.run(entries(url, "late")) == late
