"""Which engine changes a table: ``"auto"``, its limits, and what neither engine can change."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import AutoLimits, location, merge, merge_changes
from nats_stream_source.delta.engine import EngineSelector
from nats_stream_source.delta.location import TableLocation
from nats_stream_source.delta.spark import session
from nats_stream_source.errors import ConfigurationError, MissingPackageError
from tests.integration.delta.kv_bucket import Bucket
from tests.integration.delta.merge_model import Frame, put
from tests.integration.delta.table_content import live, version

pytestmark = pytest.mark.delta


def writer(table: Path | str) -> str:
    """Return the engine that committed the table's last version."""
    info = DeltaTable(table).history(1)[0]["engineInfo"]
    return "spark" if info.startswith("Apache-Spark") else "delta-rs"


@pytest.mark.parametrize(
    ("limits", "exceeded"),
    [
        ({}, None),
        ({"batch_rows": 2}, None),
        ({"batch_rows": 1}, "batch_rows"),
        ({"batch_bytes": 10}, "batch_bytes"),
        ({"table_bytes": 10, "deletion_vectors": False}, "table_bytes"),
        ({"table_bytes": 10}, None),
        ({"index_bytes": 10}, "index_bytes"),
        ({"driver_memory": 1}, "driver_memory"),
        (dict.fromkeys(AutoLimits.__slots__), None),
    ],
)
def test_limits(
    frame: Frame,
    table: Path,
    limits: dict[str, Any],
    exceeded: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A MERGE by Spark takes seconds: the test refuses to make Spark's engine."""

    def refuse(selector: EngineSelector, spark: SparkSession) -> None:
        raise SparkSelectedError

    vectors = limits.pop("deletion_vectors", None)
    merge(frame(put("a", 1)), str(table), engine="delta-rs", deletion_vectors=vectors)
    monkeypatch.setattr(EngineSelector, "_spark_engine", refuse)
    with pytest.raises(SparkSelectedError) if exceeded else nullcontext():
        batch = frame(put("a", 2), put("b", 3))
        merge(batch, str(table), limits=AutoLimits(**limits), deletion_vectors=vectors)
    assert live(table) == ({"a": 1} if exceeded else {"a": 2, "b": 3})


class SparkSelectedError(Exception):
    """The selector chooses Spark's engine."""


def test_executors_reduce_batch_to_its_keys(frame: Frame, table: Path) -> None:
    """The limit applies to what a partition sends: 40 rows of 4 keys are 4 rows."""
    batch = [put(key, revision) for revision in range(1, 11) for key in "abcd"]
    merge(frame(*batch).repartition(2), str(table), limits=AutoLimits(batch_rows=4))
    assert writer(table) == "delta-rs"
    assert live(table) == dict.fromkeys("abcd", 10)


def test_engine_change_is_logged_once(
    frame: Frame, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follow = merge_changes(str(table), limits=AutoLimits(batch_rows=1))
    with caplog.at_level(logging.INFO, "nats_stream_source"):
        follow(frame(put("a", 1)), 0)
        caplog.clear()  # the table was created
        for revision in (2, 4):
            follow(frame(put("a", revision), put("b", revision + 1)), revision)
        follow(frame(put("a", 6)), 6)
    messages = [record.getMessage().partition(" table=")[0] for record in caplog.records]
    assert messages == ["Spark changes the table", "delta-rs changes the table"]
    assert "batch_rows is 2, limit 1" in caplog.records[0].getMessage()


def test_limit_exceeded_without_delta_lake_in_session(
    frame: Frame, table: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "missing", lambda spark: "the session lacks Delta's jar")
    follow = merge_changes(str(table), limits=AutoLimits(batch_rows=1, batch_bytes=1))
    for revision in (1, 3):
        follow(frame(put("a", revision), put("b", revision + 1)), revision)
    assert (writer(table), live(table)) == ("delta-rs", {"a": 3, "b": 4})
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2  # one for each limit
    assert "Spark cannot take over: the session lacks Delta's jar" in caplog.text


def test_engines_both_unable(
    spark: SparkSession, frame: Frame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "missing", lambda spark: "the session lacks Delta's jar")
    for table, reason in {
        "fleet": "a name in the catalog",
        "s3a://lake/fleet": "scheme 's3a'",
    }.items():
        with pytest.raises(
            ConfigurationError, match=f"{reason}.*lacks Delta's jar.*configure_delta"
        ):
            merge(frame(put("a", 1)), table)


def test_type_unsupported_by_delta_rs(frame: Frame, table: Path) -> None:
    batch = frame(put("a", 1)).withColumn("value", F.parse_json(F.lit('{"x": 1}')))
    merge(batch, str(table))
    assert writer(table) == "spark"
    with pytest.raises(ConfigurationError, match=r"has the type VARIANT.*use engine='spark'"):
        merge(batch, str(table.with_name("new")), engine="delta-rs")


def test_path_outside_local_file_system(spark: SparkSession) -> None:
    def problem(table: str, **arguments: Any) -> str | None:
        return TableLocation(table, **arguments).delta_rs_problem(spark)

    assert problem("/lake/fleet") is problem("./fleet") is problem("file:///lake/fleet") is None
    assert problem("s3://lake/fleet", storage_options={"AWS_REGION": "x"}) is None
    assert "scheme 's3'" in str(problem("s3://lake/fleet"))
    assert "catalog" in str(problem("lake.fleet"))
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    configuration.set("fs.defaultFS", "hdfs://namenode:8020")
    try:
        assert "hdfs://namenode:8020" in str(problem("/lake/fleet"))
    finally:
        configuration.set("fs.defaultFS", "file:///")


def test_arguments_are_checked_when_function_is_created(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("/lake/fleet", {"engine": "rust"}, "engine is 'rust', expected 'auto', 'delta-rs' or"),
        ("/lake/fleet", {"engine": "spark", "storage_options": {}}, "storage_options with engine="),
        ("fleet", {"engine": "delta-rs"}, "engine='delta-rs' with table 'fleet'.*a name in the"),
        ("fleet", {"storage_options": {"a": "b"}}, "storage_options with table 'fleet'"),
    ]
    for table, arguments, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            merge_changes(table, **arguments)
    for value in (0, -1, True, 1.5, "1"):
        with pytest.raises(ConfigurationError, match=r"batch_rows is .*expected an integer from 1"):
            AutoLimits(batch_rows=value)
    monkeypatch.setattr(location, "_installed", lambda: False)
    with pytest.raises(MissingPackageError, match=r"deltalake is not installed.*\[delta\]"):
        merge_changes("/lake/fleet", engine="delta-rs")
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


def test_reconcile_accepts_engine(
    spark: SparkSession, frame: Frame, table: Path, bucket: Bucket
) -> None:
    from nats_stream_source.delta import reconcile

    merge(frame(*bucket.write(("a", "PUT"), ("b", "PUT"))), str(table))
    for key, limits, chosen in [("a", None, "delta-rs"), ("b", AutoLimits(index_bytes=1), "spark")]:
        bucket.purge_subjects(key)
        result = reconcile(spark, str(table), bucket=bucket.name, servers=bucket.url, limits=limits)
        assert (result.removed, writer(table)) == (1, chosen)
    assert version(table) == 3
