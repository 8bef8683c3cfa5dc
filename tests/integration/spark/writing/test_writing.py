"""Rows written by Spark to a real server: what is stored is what the DataFrame had."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.options.writing import kv_write_options, stream_write_options
from nats_stream_source.spark.datasource import NatsKvDataSource
from nats_stream_source.spark.writing.task import prepare_target, write_task
from tests.support.nats.buckets import (
    api,
    create_bucket,
    delete,
    fill_bucket,
    publish,
    put,
)
from tests.support.nats.streams import create_stream, stream_state
from tests.support.query_driver.batch import Row, read_batch
from tests.support.spark.streaming_query import run_to_the_end

Write = Callable[..., None]


@pytest.fixture
def write(url: str) -> Write:
    """Write a DataFrame to a bucket, or with ``stream`` to a stream."""

    def write(frame: DataFrame, mode: str = "append", **options: Any) -> None:
        name = "nats_stream" if "stream" in options else "nats_kv"
        writer = frame.write.format(name).option("servers", url)
        writer.options(**options).mode(mode).save()

    return write


def messages(url: str, stream: str) -> list[Row]:
    return read_batch(url, stream=stream, includeHeaders="true")


def entries(url: str, bucket: str) -> dict[str, tuple[str, Any]]:
    return {row["key"]: (row["operation"], row["value"]) for row in read_batch(url, bucket=bucket)}


def test_bucket_copy_in_one_line(spark: SparkSession, url: str, write: Write) -> None:
    fill_bucket(url, "origin", [(f"k.{i}", b"v%d" % i) for i in range(300)], 3)
    put(url, "origin", "with-headers", b"\x00\xff", {"Trace": "x"})
    delete(url, "origin", "k.7")
    frame = spark.read.format("nats_kv").option("servers", url).option("bucket", "origin")
    write(frame.option("includeHeaders", True).load(), bucket="copied", ifMissing="create")
    assert entries(url, "copied") == entries(url, "origin")
    assert len(entries(url, "copied")) == 301
    headers = {
        row["key"]: row["headers"]
        for row in read_batch(url, bucket="copied", includeHeaders="true")
    }
    assert headers["with-headers"] == [("Trace", ["x"])]
    assert headers["k.1"] is None


def test_operations_headers_and_ttl(spark: SparkSession, url: str, write: Write) -> None:
    create = {"ifMissing": "create", "history": "5", "limitMarkerTtl": "60"}
    rows = [
        ("a", "1", None, None, None),
        ("b", "1", "PUT", None, {"Trace": ["x", "y"]}),
        ("c", "", "PUT", 3600, None),
        ("b", None, "DEL", None, None),
        ("a", "2", "PUT", None, None),
        ("a", None, "PURGE", None, None),
    ]
    ddl = "key STRING, value STRING, operation STRING, ttl INT, headers MAP<STRING, ARRAY<STRING>>"
    write(spark.createDataFrame(rows, ddl).coalesce(1), bucket="operations", **create)
    assert entries(url, "operations") == {
        "a": ("PURGE", None),
        "b": ("DEL", None),
        "c": ("PUT", b""),
    }
    stored = messages(url, "KV_operations")
    found = [(row["subject"].removeprefix("$KV.operations."), row["headers"]) for row in stored]
    assert found == [
        ("b", [("Trace", ["x", "y"])]),
        ("c", [("Nats-TTL", ["3600s"])]),
        ("b", [("KV-Operation", ["DEL"])]),
        ("a", [("KV-Operation", ["PURGE"]), ("Nats-Rollup", ["sub"])]),
    ]


def test_rows_of_key_keep_their_order(spark: SparkSession, url: str, write: Write) -> None:
    frame = spark.range(30_000).selectExpr("concat('k', id % 50) AS key", "string(id) AS value")
    ordered = frame.repartition("key").sortWithinPartitions(frame.value.cast("int"))
    write(ordered, bucket="ordered", ifMissing="create")
    assert {key: int(value) for key, (_, value) in entries(url, "ordered").items()} == {
        f"k{i}": 29_950 + i for i in range(50)
    }


def test_conflicts(
    spark: SparkSession,
    url: str,
    write: Write,
) -> None:
    create_bucket(url, "conflicts", 5)
    revision = put(url, "conflicts", "a", b"theirs")
    ddl = "key STRING, value STRING, expected_revision BIGINT"
    mine = spark.createDataFrame([("a", "mine", 0), ("b", "mine", 0)], ddl)
    with pytest.raises(
        PySparkException, match=rf"WrongLastSequenceError.*'a'.*revision {revision}"
    ):
        write(mine, bucket="conflicts")
    write(mine, bucket="conflicts", onConflict="skip")
    assert entries(url, "conflicts")["a"] == ("PUT", b"theirs")
    assert entries(url, "conflicts")["b"] == ("PUT", b"mine")
    matching = spark.createDataFrame([("a", "newer", revision)], ddl)
    write(matching, bucket="conflicts")
    assert entries(url, "conflicts")["a"] == ("PUT", b"newer")


def test_stream_write(spark: SparkSession, url: str, write: Write) -> None:
    rows = [("orders.1", "one", "id-1", None), ("orders.2", "two", None, {"Trace": ["x"]})]
    ddl = "subject STRING, data STRING, msg_id STRING, headers MAP<STRING, ARRAY<STRING>>"
    frame = spark.createDataFrame(rows, ddl).coalesce(1)
    write(frame, stream="WRITTEN", ifMissing="create", subjects="orders.>")
    write(frame, stream="WRITTEN")
    found = [(row["subject"], row["data"], row["headers"]) for row in messages(url, "WRITTEN")]
    two = ("orders.2", b"two", [("Trace", ["x"])])
    assert found == [("orders.1", b"one", [("Nats-Msg-Id", ["id-1"])]), two, two]


@pytest.mark.parametrize("message_id", ["none", "auto"])
def test_fast_ingest(spark: SparkSession, url: str, write: Write, message_id: str) -> None:
    """Every row once and in order; the rows of a task are more than one batch."""
    stream = f"FAST_{message_id}"
    frame = spark.range(12_000).coalesce(1).selectExpr("CAST(id AS STRING) AS data")
    options = {"stream": stream, "subject": "fast.x." + message_id, "messageId": message_id}
    write(frame, ifMissing="create", fastIngest="true", **options)
    assert api(url, f"STREAM.INFO.{stream}")["config"]["allow_batched"]
    found = messages(url, stream)
    assert [row["data"] for row in found] == [b"%d" % i for i in range(12_000)]
    ids = [dict(row["headers"] or []).get("Nats-Msg-Id") for row in found]
    assert len(set(map(str, ids))) == (12_000 if message_id == "auto" else 1)


def test_task_repeated_with_fast_ingest(url: str) -> None:
    """As Spark repeats a task that has failed at its end: with ids each row is stored once."""
    given = {"servers": url, "stream": "AGAIN", "subject": "again", "ifMissing": "create"}
    options = stream_write_options({**given, "fastIngest": "true", "messageId": "auto"})
    rows = pa.record_batch({"data": [b"%d" % i for i in range(2000)]})
    for _ in range(2):
        assert write_task(options, iter([rows]), job="job", partition=0).stored == 2000
    assert [row["data"] for row in messages(url, "AGAIN")] == [b"%d" % i for i in range(2000)]


HEADERS = pa.map_(pa.string(), pa.list_(pa.string()))
CHANGED = {
    "skip": [("Trace", ["x"])],
    "encode": [("Trace", ["x"]), ("Gr%C3%B6%C3%9Fe", ["1"])],
}


@pytest.mark.parametrize("target", ["bucket", "stream"])
def test_header_that_cannot_be_sent(
    url: str, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"headers-{target}"
    headers = pa.array([[("Trace", ["x"]), ("Größe", ["1"])]], HEADERS)
    names = ("key", "value") if target == "bucket" else ("subject", "data")
    rows = pa.record_batch({names[0]: ["a"], names[1]: [b"v"], "headers": headers})

    def write(how: str) -> None:
        given = {"servers": url, target: name, "ifMissing": "create", "invalidHeaders": how}
        options = (
            kv_write_options(given)
            if target == "bucket"
            else stream_write_options({**given, "subjects": "a"})
        )
        write_task(options, iter([rows]), job="job", partition=0)

    with pytest.raises(ConfigurationError, match=r"'Größe'.*set option 'invalidHeaders' to '"):
        write("fail")
    for how, stored in CHANGED.items():
        write(how)
        found = messages(url, f"KV_{name}" if target == "bucket" else name)
        assert found[-1]["headers"] == stored
        line = f"headers that cannot be sent were changed target={name} headers=1 how={how}"
        assert line in caplog.text


def copy(
    spark: SparkSession, url: str, source_bucket: str, checkpoint: Path, **options: str
) -> None:
    """Copy a bucket up to its end, by a streaming query."""
    source = (
        spark.readStream.format("nats_kv")
        .options(servers=url, bucket=source_bucket, includeHistory="true", maxRowsPerTrigger="40")
        .load()
    )
    sink = source.writeStream.format("nats_kv").options(servers=url, ifMissing="create", **options)
    # Spark passes the options of the query to the sink: its name, too.
    named = sink.queryName(f"copy_{options['bucket']}")
    trigger = named.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    run_to_the_end(trigger.start)


@pytest.mark.parametrize(("message_id", "copies"), [("auto", 1), ("none", 2)])
def test_micro_batch_repeated(
    spark: SparkSession,
    url: str,
    tmp_path: Path,
    message_id: str,
    copies: int,
) -> None:
    """Without its commit, Spark repeats the last micro-batch: as after a killed driver."""
    source, bucket = f"source_{message_id}", f"repeated_{message_id}"
    fill_bucket(url, source, [(f"k{i % 30}", b"%d" % i) for i in range(100)], 5)
    copy(spark, url, source, tmp_path, bucket=bucket, messageId=message_id, history="10")
    stored = messages(url, f"KV_{bucket}")
    assert [row["data"] for row in stored] == [b"%d" % i for i in range(100)]
    commits = sorted(path for path in (tmp_path / "commits").glob("*") if path.name.isdigit())
    for path in (commits[-1], commits[-1].with_name(f".{commits[-1].name}.crc")):
        path.unlink(missing_ok=True)
    copy(spark, url, source, tmp_path, bucket=bucket, messageId=message_id, history="10")
    repeated = [row["data"] for row in messages(url, f"KV_{bucket}")][100:]
    assert len(repeated) == (copies - 1) * 20, "20 rows are in the last micro-batch"
    assert entries(url, bucket) == entries(url, source)


REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("'a' AS key, 'v' AS value", {"bucket": "missing"}, "BucketNotFoundError.*'missing'"),
    ("'a' AS subject, 'v' AS data", {"stream": "missing"}, "StreamNotFoundError.*missing"),
    ("'a' AS key", {"bucket": "b", "stream": "S"}, "unknown option 'bucket'"),
    ("'a' AS key, 1 AS value", {"bucket": "b"}, "column 'value' is INT"),
    ("'a' AS key, 'v' AS value", {"bucket": "mirrored"}, "is a mirror, which is read-only; write"),
    ("'a' AS subject, 'v' AS data", {"stream": "SEALED"}, "is sealed, which is read-only"),
    ("'a' AS key, 'v' AS value", {"bucket": "silent"}, "bucket 'silent': its stream has no_ack"),
    ("'silent.a' AS subject, 'v' AS data", {"stream": "SILENT"}, "'SILENT': its stream has no_ack"),
    (
        "'silent.a' AS subject, 'v' AS data",
        {"stream": "SILENT", "fastIngest": "true"},
        "'SILENT': its stream has no_ack",
    ),
    ("'a' AS subject, 'v' AS data", {"stream": "KV_mirrored"}, "does not have subjects"),
    ("'a' AS data", {"stream": "PLAIN"}, "column 'subject' is missing"),
    (
        "'plain.a' AS subject, 'v' AS data",
        {"stream": "PLAIN", "fastIngest": "true"},
        "FastIngestNotSupportedError.*does not have allow_batched.*remove the option 'fastIngest'",
    ),
    (
        "'a' AS key, 'v' AS value",
        {"bucket": "b", "fastIngest": "true"},
        "'fastingest'.*a PubAck of its own",
    ),
    ("'elsewhere' AS subject, 'v' AS data", {"stream": "PLAIN"}, "does not have the subject"),
    ("'a b' AS key, 'v' AS value", {"bucket": "plain"}, "row 0 of partition .*'a b'"),
    ("'a' AS key, 'v' AS value, 5 AS ttl", {"bucket": "plain"}, "does not accept a ttl"),
    ("'a' AS key, repeat('x', 2000000) AS value", {"bucket": "plain"}, "has 2000000 bytes"),
]


@pytest.mark.parametrize(("columns", "options", "problem"), REFUSED)
def test_refused(
    spark: SparkSession,
    url: str,
    write: Write,
    columns: str,
    options: dict[str, str],
    problem: str,
) -> None:
    create_bucket(url, "plain")
    mirror = {"name": "KV_mirrored", "mirror": {"name": "KV_plain"}, "max_msgs_per_subject": 1}
    api(url, "STREAM.CREATE.KV_mirrored", mirror)
    create_stream(url, "PLAIN", "plain.>")
    create_stream(url, "SILENT", "silent.>", no_ack=True, allow_batched=True)
    create_stream(url, "KV_silent", "$KV.silent.>", no_ack=True, max_msgs_per_subject=1)
    if "SEALED" not in (api(url, "STREAM.NAMES")["streams"] or ()):
        sealed = create_stream(url, "SEALED", "sealed.>")["config"]
        api(url, "STREAM.UPDATE.SEALED", {**sealed, "sealed": True})
    with pytest.raises(PySparkException) as caught:
        write(spark.sql(f"SELECT {columns}"), **options)
    assert re.search(problem, str(caught.value), re.DOTALL)
    assert all(not stream_state(url, name)["messages"] for name in ("SILENT", "KV_silent"))


def test_modes(spark: SparkSession, write: Write) -> None:
    frame = spark.createDataFrame([("a", "v")], "key STRING, value STRING")
    with pytest.raises(PySparkException, match="the mode is 'overwrite', expected 'append'"):
        write(frame, mode="overwrite", bucket="modes", ifMissing="create")
    with pytest.raises(PySparkException, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
        write(frame, mode="errorifexists", bucket="modes", ifMissing="create")


def test_server_unreachable_fails_before_job(spark: SparkSession) -> None:
    frame = spark.createDataFrame([("a", "v")], "key STRING, value STRING")
    writer = frame.write.format("nats_kv").options(
        servers="nats://127.0.0.1:1", bucket="b", connectTimeout="0.2"
    )
    with pytest.raises(PySparkException, match="Failed to initialize Python data source writer"):
        writer.mode("append").save()


def test_duplicate_window_short_warns(
    url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"servers": url, "bucket": "short", "ifMissing": "create"}
    caplog.set_level(logging.WARNING)
    prepare_target(kv_write_options({**given, "messageId": "auto", "duplicateWindow": "5"}))
    assert "duplicate window is shorter than a restart may take" in caplog.text
    assert publish(url, [("$KV.short.a", b"", None)]) == [1], "it was created"


@pytest.mark.parametrize(
    ("columns", "history", "warns"),
    [("key STRING, ttl INT", 5, True), ("key STRING, ttl INT", 1, False), ("key STRING", 5, False)],
)
def test_ttl_in_bucket_with_history_warns(
    spark: SparkSession,
    url: str,
    caplog: pytest.LogCaptureFixture,
    columns: str,
    history: int,
    warns: bool,
) -> None:
    bucket = f"expiring{history}"
    given = {"servers": url, "bucket": bucket, "ifMissing": "create"}
    options = {**given, "history": str(history), "limitMarkerTtl": "60"}
    caplog.set_level(logging.WARNING)
    NatsKvDataSource(options).writer(StructType.fromDDL(columns), overwrite=False)
    warning = "a row that expires makes the older revision of its key current again"
    assert (warning in caplog.text) == warns
