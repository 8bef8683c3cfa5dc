"""Which engine changes a table: ``"auto"`` at the first batch, its limit, and invalid arguments."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from nats_stream_source.delta import AutoLimits, location, maintain, merge, merge_changes, reconcile
from nats_stream_source.delta.spark import choice, session
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConfigurationError, MissingPackageError
from tests.integration.delta.driver.in_process import rebuilt
from tests.integration.delta.merge_model import Bucket, Frame, live, put
from tests.support.spark.session import program_environment

pytestmark = pytest.mark.delta


def writer(table: Path | str) -> str:
    """Return the engine that committed the table's last version."""
    info = DeltaTable(table).history(1)[0]["engineInfo"]
    return "spark" if info.startswith("Apache-Spark") else "driver"


def test_engine_is_chosen_once_by_size_of_index(
    frame: Frame, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A query whose index has grown beyond the limit ends; the next one chooses Spark."""
    caplog.set_level(logging.INFO, "nats_stream_source.delta")
    merge(frame(put("a", 1)), str(table), upkeep=None)
    limits = AutoLimits(index_bytes=int(1.1 * rebuilt(table).index.nbytes))
    follow = merge_changes(str(table), limits=limits)
    for revision in (2, 3):
        follow(frame(put("a", revision)), revision)
    near = [one for one in caplog.messages if "beyond its limit" in one]
    assert len(near) == 1
    assert sum("the driver changes the table" in one for one in caplog.messages) == 2
    follow(frame(*(put(f"k{n}", n) for n in range(10, 1000))), 4)
    before = DeltaTable(table).version()
    with pytest.raises(ConfigurationError, match=r"index_bytes is .*restart the query"):
        follow(frame(put("a", 2000)), 5)
    assert DeltaTable(table).version() == before
    restarted = merge_changes(str(table), limits=limits)
    choice._driven.clear()  # the query of this process that has taken the driver
    caplog.clear()
    for revision in (2000, 2001):
        restarted(frame(put("a", revision)), revision)
    assert (writer(table), live(table)["a"]) == ("spark", 2001)
    (line,) = [one for one in caplog.messages if "changes the table" in one]
    assert "Spark changes the table" in line
    assert "index" in line


def test_limit_exceeded_without_delta_lake_in_session(
    frame: Frame, table: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "missing", lambda spark: "the session lacks Delta's jar")
    follow = merge_changes(str(table), limits=AutoLimits(index_bytes=1))
    for revision in (1, 3):
        follow(frame(put("a", revision), put("b", revision + 1)), revision)
    assert (writer(table), live(table)) == ("driver", {"a": 3, "b": 4})
    assert [one.levelname for one in caplog.records if "index" in one.getMessage()] == ["WARNING"]
    for name, reason in {"fleet": "a name in the catalog", "s3a://l/f": "scheme 's3a'"}.items():
        with pytest.raises(ConfigurationError, match=f"{reason}.*lacks Delta's jar.*delta=True"):
            merge(frame(put("a", 1)), name)


def test_arguments_are_checked_when_function_is_created(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("/lake/fleet", {"engine": "rust"}, "engine is 'rust', expected 'auto', 'driver' or"),
        ("/lake/fleet", {"engine": "spark", "storage_options": {}}, "storage_options with engine="),
        ("fleet", {"engine": "driver"}, "engine='driver' with table 'fleet'.*a name in the"),
        ("fleet", {"storage_options": {"a": "b"}}, "storage_options with table 'fleet'"),
        ("fleet", {"deletion_vectors": True}, "deletion_vectors=True with table 'fleet'"),
    ]
    for table, arguments, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            merge_changes(table, **arguments)
    for value in (0, -1, True, 1.5, "1"):
        with pytest.raises(ConfigurationError, match=r"index_bytes is .*expected an integer from"):
            AutoLimits(index_bytes=value)
    for module in (location, choice):
        monkeypatch.setattr(module, "driver_installed", lambda: False)
    with pytest.raises(MissingPackageError, match=r"deltalake is not installed.*\[delta\]"):
        merge_changes("/lake/fleet", engine="driver")
    merge_changes("/lake/fleet")  # this session has Delta Lake
    monkeypatch.setattr(session, "missing", lambda spark: "the session lacks Delta's jar")
    with pytest.raises(MissingPackageError, match="deltalake, and for engine 'spark' the session"):
        merge_changes("/lake/fleet")
    for table, chosen in (("/lake/fleet", "spark"), ("fleet", "auto")):
        with pytest.raises(ConfigurationError, match="the session lacks Delta's jar; start"):
            merge_changes(table, engine=chosen)


def test_secrets_are_in_no_repr() -> None:
    follow = merge_changes("s3://lake/fleet", storage_options={"AWS_SECRET_ACCESS_KEY": "hidden"})
    assert "hidden" not in repr(follow)
    assert "s3://lake/fleet" in repr(follow)


def test_reconcile_and_maintain_take_driver_while_query_of_process_has_it(
    spark: SparkSession, frame: Frame, table: Path, bucket: Bucket
) -> None:
    """Of two writers of one process, one would lose its commit again and again."""
    query = merge_changes(str(table), upkeep=None)
    for entry in bucket.write(("a", "PUT"), ("b", "PUT")):
        query(frame(entry))
    limits = AutoLimits(index_bytes=1)

    def reconciled(key: str) -> int:
        bucket.purge_subjects(key)
        arguments = {"bucket": bucket.name, "servers": bucket.url}
        return reconcile(spark, str(table), limits=limits, **arguments).removed

    assert (reconciled("a"), writer(table)) == (1, "driver")
    maintain(spark, str(table))
    assert writer(table) == "driver"
    del query
    choice._driven.clear()
    assert (reconciled("b"), writer(table)) == (1, "spark")


PROGRAM = """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
from nats_stream_source.delta import merge, merge_changes, reconcile
servers, bucket, table = sys.argv[1:]

spark = SparkSession.builder.getOrCreate()
query = (
    spark.readStream.format("nats_kv")
    .option("servers", servers)
    .option("bucket", bucket)
    .load()
    .writeStream.foreachBatch(merge_changes(table))
    .option("checkpointLocation", table + "-checkpoint")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
print(reconcile(spark, table, bucket=bucket, servers=servers))
batch = spark.read.format("nats_kv").options(servers=servers, bucket=bucket).load()
for refused in (
    lambda: merge_changes(table, engine="spark"),
    lambda: merge(batch, "fleet"),
):
    try:
        refused()
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_plain_session_merges(shared_server: NatsServer, tmp_path: Path) -> None:
    bucket = Bucket(shared_server.url, "plain").create()
    bucket.write(("a", "PUT"), ("b", "PUT"), ("a", "DEL"), ("c", "PUT"))
    bucket.purge_subjects("c")
    table = tmp_path / "table"
    environment = {
        **program_environment(tmp_path / "conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, bucket.url, bucket.name, str(table)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert live(table) == {"b": 2}
    counts, spark, catalog = done.stdout.splitlines()[-3:]
    assert counts == "ReconcileResult(removed=0, kept=1, changed=0, last_seq=4, replaced=0)"
    assert spark.startswith(
        "ConfigurationError could not use engine='spark': the session lacks Delta's jar "
        "(io.delta:delta-spark_"
    )
    assert "`configure(SparkSession.builder, delta=True).getOrCreate()`" in spark
    assert (
        "cannot (the table is a name in the catalog), and for engine 'spark' the session" in catalog
    )
