"""Which engine changes a table, and the session's settings, which change no rows or instants."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession, functions as F

from nats_stream_source.delta import AutoLimits, location, maintain, merge, merge_changes, reconcile
from nats_stream_source.delta.spark import choice, session
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConfigurationError, MissingPackageError
from tests.integration.delta.driver.in_process import rebuilt
from tests.integration.delta.merge_model import ENGINES, Bucket, Frame, live, put
from tests.support.delta import rows_of
from tests.support.nats.buckets import create_bucket, publish
from tests.support.nats.streams import create_stream
from tests.support.program import ran
from tests.support.query_driver.batch import read_batch
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
import sys
from pyspark.sql import SparkSession
from nats_stream_source.delta import merge, merge_changes
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
    bucket.write(("a", "PUT"), ("b", "PUT"), ("a", "DEL"))
    table = tmp_path / "table"
    environment = {**program_environment(tmp_path / "conf"), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["PYSPARK_PYTHON"] = sys.executable
    words = sys.executable, "-c", PROGRAM, bucket.url, bucket.name, table
    done = ran(*words, cwd=tmp_path, environment=environment)
    assert live(table) == {"b": 2}
    spark, catalog = done.stdout.splitlines()[-2:]
    assert spark.startswith(
        "ConfigurationError could not use engine='spark': the session lacks Delta's jar "
        "(io.delta:delta-spark_"
    )
    assert "`configure(SparkSession.builder, delta=True).getOrCreate()`" in spark
    assert (
        "cannot (the table is a name in the catalog), and for engine 'spark' the session" in catalog
    )


_AUTO_MERGE = "spark.databricks.delta.schema.autoMerge.enabled"
_DEFAULTS = "spark.databricks.delta.properties.defaults"
SETTINGS: dict[str, dict[str, str]] = {
    "local times": {"spark.sql.timestampType": "TIMESTAMP_NTZ"},
    "time zone": {"spark.sql.session.timeZone": "Asia/Kolkata"},
    "case": {"spark.sql.caseSensitive": "true"},
    "not ANSI": {"spark.sql.ansi.enabled": "false"},
    "strict assignment": {"spark.sql.storeAssignmentPolicy": "STRICT"},
    "legacy assignment": {
        "spark.sql.storeAssignmentPolicy": "LEGACY",
        "spark.sql.ansi.enabled": "false",
    },
    "INT96": {"spark.sql.parquet.outputTimestampType": "INT96"},
    "microseconds": {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"},
    "legacy format": {"spark.sql.parquet.writeLegacyFormat": "true"},
    "defaults of tables": {
        f"{_DEFAULTS}.columnMapping.mode": "name",
        f"{_DEFAULTS}.enableChangeDataFeed": "true",
        f"{_DEFAULTS}.enableDeletionVectors": "true",
    },
    "one row in Arrow": {"spark.sql.execution.arrow.maxRecordsPerBatch": "1"},
    "large types": {"spark.sql.execution.arrow.useLargeVarTypes": "true"},
    "self-destruct": {"spark.sql.execution.arrow.pyspark.selfDestruct.enabled": "true"},
    "quoted expressions": {"spark.sql.parser.quotedRegexColumnNames": "true"},
    "double quotes": {"spark.sql.ansi.doubleQuotedIdentifiers": "true"},
    "reserved words": {"spark.sql.ansi.enforceReservedKeywords": "true"},
    "evolution": {_AUTO_MERGE: "true"},
    "legacy": {
        "spark.sql.legacy.timeParserPolicy": "LEGACY",
        "spark.sql.legacy.charVarcharAsString": "true",
        "spark.sql.legacy.followThreeValuedLogicInArrayExists": "false",
        "spark.sql.legacy.createEmptyCollectionUsingStringType": "true",
        "spark.sql.legacy.parquet.nanosAsLong": "true",
        "spark.sql.mapKeyDedupPolicy": "LAST_WIN",
    },
}
# `make test` has all but these in one session, and `make test-faults` each setting on its own.
APART = (
    *("legacy assignment", "INT96", "microseconds"),
    *("defaults of tables", "self-destruct", "evolution"),
)
RULES: dict[str, dict[str, Any]] = {
    "entries": {},
    "history": {"stored_as_scd_type": 2},
    "events": {"keys": "key", "sequence_by": "seen"},
}


@pytest.fixture(
    params=["together", *(pytest.param(name, marks=pytest.mark.faults) for name in SETTINGS)]
)
def own_session(request: pytest.FixtureRequest, spark: SparkSession) -> SparkSession:
    """A session with settings of its own."""
    own = spark.newSession()
    together = [name for name in SETTINGS if name not in APART]
    for name in together if request.param == "together" else (request.param,):
        for setting, value in SETTINGS[name].items():
            own.conf.set(setting, value)
    return own


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with a bucket and a stream."""
    with NatsServer() as server:
        create_bucket(server.url, "fleet", history=5)
        create_stream(server.url, "S", "s.>")
        headers = {"h": "1"}
        publish(server.url, [("$KV.fleet.a", b"1", headers), ("$KV.fleet.b", b"2", headers)])
        publish(server.url, [("$KV.fleet.a", b"3", None), ("s.x", b"1", headers)])
        yield server.url


def entries(spark: SparkSession, url: str) -> DataFrame:
    """The bucket's history with columns of types that settings concern."""
    options = {"servers": url, "bucket": "fleet", "includeHistory": "true"}
    frame = spark.read.format("nats_kv").options(**options, includeHeaders="true").load()
    return frame.select(
        "*",
        F.timestamp_micros(F.col("revision") * 1_000_001).alias("seen"),
        F.col("revision").cast("int").alias("n"),
        F.lit(Decimal("1.20")).alias("price"),
        F.lit(date(1500, 1, 2)).alias("day"),
        F.array(F.lit("x"), F.col("key")).alias("tags"),
        F.struct(F.col("created").alias("at"), F.col("key").alias("Key")).alias("nested"),
    )


def messages(spark: SparkSession, url: str) -> DataFrame:
    options = {"servers": url, "stream": "S", "filterSubjects": "s.x"}
    return spark.read.format("nats_stream").options(**options, includeHeaders="true").load()


def content(frame: DataFrame) -> list[dict[str, Any]]:
    """The rows with instants in UTC, without the column that may differ when read again."""
    names = [name for name in frame.columns if name != "delta"]
    return sorted(frame.select(*names).toArrow().to_pylist(), key=repr)


def test_rows_that_are_read(spark: SparkSession, own_session: SparkSession, url: str) -> None:
    for read in (entries, messages):
        frame = read(own_session, url)
        assert frame.schema == read(spark, url).schema
        assert content(frame) == content(read(spark, url))


def test_rows_that_are_written(own_session: SparkSession, url: str, tmp_path: Path) -> None:
    """By a batch to a bucket and by a stream to a stream."""
    if own_session.conf.get(_AUTO_MERGE, None) == "true":
        pytest.skip("with Delta Lake 4.4 a batch write with options fails in each format")
    name = tmp_path.name
    create_bucket(url, name)
    latest = own_session.read.format("nats_kv").options(servers=url, bucket="fleet").load()
    columns = latest.withColumn("expected_revision", F.lit(0)).drop("bucket")
    columns.write.format("nats_kv").options(servers=url, bucket=name).mode("append").save()
    create_stream(url, name)
    changes = own_session.readStream.format("nats_kv").options(servers=url, bucket="fleet").load()
    rows = changes.select(
        F.concat(F.lit(f"{name}."), F.col("key")).alias("subject"), F.col("value").alias("data")
    )
    writer = rows.writeStream.format("nats_stream").options(servers=url, stream=name)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    copy = {row["key"]: row["value"] for row in read_batch(url, bucket=name)}
    stored = {row["subject"]: row["data"] for row in read_batch(url, stream=name)}
    assert copy == {"a": b"3", "b": b"2"}
    assert stored == {f"{name}.a": b"3", f"{name}.b": b"2"}


@pytest.mark.parametrize(
    "rules",
    ["history", *(pytest.param(name, marks=pytest.mark.faults) for name in ("entries", "events"))],
)
def test_tables_of_engines_in_turn(
    spark: SparkSession, own_session: SparkSession, url: str, tmp_path: Path, rules: str
) -> None:
    batches = [entries(own_session, url).where("revision < 3"), entries(own_session, url)]
    merge(entries(spark, url), tmp_path / "expected", engine="driver", **RULES[rules])
    expected = sorted(rows_of(DeltaTable(tmp_path / "expected")), key=repr)
    for engines in itertools.permutations(ENGINES):  # of the first and the second batch
        table = tmp_path / "-".join(engines)
        first, second = engines
        merge(batches[0], table, engine=first, **RULES[rules])
        if second == "driver" and own_session.conf.get(f"{_DEFAULTS}.columnMapping.mode", None):
            with pytest.raises(ConfigurationError, match="change feed"):
                merge(batches[1], table, engine=second, **RULES[rules])
            second = "spark"
        merge(batches[1], table, engine=second, **RULES[rules])
        assert sorted(rows_of(DeltaTable(table)), key=repr) == expected
        read = own_session.read.format("delta").load(str(table))
        assert content(read) == content(spark.read.format("delta").load(str(tmp_path / "expected")))
    deletes = {"engine": "spark", "bucket": "fleet", "servers": url}
    if rules != "events":
        assert reconcile(own_session, table, **deletes).kept == 2
