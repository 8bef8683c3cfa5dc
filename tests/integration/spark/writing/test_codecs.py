"""Which DataFrames can be written, and encoded keys and values, copied by a query into others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import OptionError
from nats_stream_source.rows.columns import ddl as columns_read
from nats_stream_source.spark.writing.columns import validate_columns
from tests.support.query_driver.batch import read_batch
from tests.support.spark.streaming_query import run_to_the_end

CODECS = {"keyCodec": "base64", "valueCodec": "base64"}


PATHS = {"keyCodec": "path,base64"}


@pytest.fixture
def written(spark: SparkSession, shared_server: NatsServer) -> Callable[..., None]:
    """Write keys, whose values are the keys, as one batch."""

    def write(bucket: str, keys: list[str], **codecs: str) -> None:
        frame = spark.createDataFrame([(key, key) for key in keys], "key STRING, value STRING")
        writer = frame.write.format("nats_kv").options(servers=shared_server.url, bucket=bucket)
        writer.options(**codecs, ifMissing="create", history="5").mode("append").save()

    return write


def test_stream_writer_copies_into_other_codecs(
    spark: SparkSession,
    shared_server: NatsServer,
    written: Callable[..., None],
    tmp_path: Path,
) -> None:
    url, keys = shared_server.url, ["/a/b c", "/a/Ω", "d/e"]
    written("paths", keys, **PATHS)

    def copy(target: str, filters: str, **codecs: str) -> None:
        source = spark.readStream.format("nats_kv").options(servers=url, bucket="paths")
        read = source.options(keys=filters, includeRawKey="true", **PATHS).load()
        sink = read.writeStream.format("nats_kv").options(servers=url, bucket=target, **codecs)
        sink = sink.option("checkpointLocation", str(tmp_path / target)).option(
            "ifMissing", "create"
        )
        run_to_the_end(sink.trigger(availableNow=True).start)

    copy("copied", "/a/>", **CODECS)
    copied = {key: key.encode() for key in keys[:2]}
    assert {
        row["key"]: row["value"] for row in read_batch(url, bucket="copied", **CODECS)
    } == copied
    with pytest.raises(PySparkException, match=r"bucket 'refused': key '/a/.*': expected letters"):
        copy("refused", ">", keyCodec="path")
    with pytest.raises(PySparkException, match=r"key '/a/': it would be stored as '_root_\.a', wh"):
        written("refused", ["/a/"], keyCodec="path")
    assert read_batch(url, bucket="refused") == []


def test_conflict_names_decoded_key(
    spark: SparkSession, shared_server: NatsServer, written: Callable[..., None]
) -> None:
    url = shared_server.url
    written("conflict", ["a b"], **CODECS)
    frame = spark.createDataFrame(
        [("a b", "2", 7)], "key STRING, value STRING, expected_revision INT"
    )
    writer = frame.write.format("nats_kv").options(servers=url, bucket="conflict", **CODECS)
    with pytest.raises(PySparkException, match="could not write key 'a b' of bucket 'conflict'"):
        writer.mode("append").save()


GOOD = [
    "key STRING, value STRING",
    "key STRING, value BINARY",
    "key STRING, operation STRING",
    "key STRING, value BINARY, expected_revision INT, ttl SMALLINT",
    columns_read("nats_kv", ("includeHeaders", "includeOrigin", "includeRawKey")),
]


BAD = [
    ("value STRING", "column 'key' is missing, expected key STRING, value BINARY or STRING"),
    ("key INT, value STRING", "column 'key' is INT, expected STRING; cast it"),
    ("key STRING, value STRUCT<a: INT>", "column 'value' is STRUCT<A:INT>, expected BINARY or"),
    ("key STRING, valeu STRING", "column 'valeu' is unknown, .*; rename it to 'value', or select"),
    ("key STRING, value STRING, sequence BIGINT", "column 'sequence' is unknown"),
    ("key STRING, value STRING, ttl DOUBLE", "column 'ttl' is DOUBLE, expected BIGINT"),
    ("key STRING, value STRING, Bucket STRING", "column 'Bucket' is unknown"),
    ("key STRING, key STRING", "column 'key' occurs twice; rename or drop"),
    (
        "key STRING, value STRING, headers MAP<STRING, STRING>",
        "column 'headers' is MAP<STRING,STRING>, expected MAP<STRING, ARRAY<STRING>>",
    ),
]


@pytest.mark.parametrize("ddl", GOOD)
def test_columns_of_bucket(spark: SparkSession, ddl: str) -> None:
    validate_columns(StructType.fromDDL(ddl), "nats_kv")


@pytest.mark.parametrize(("ddl", "problem"), BAD)
def test_refused_columns_of_bucket(spark: SparkSession, ddl: str, problem: str) -> None:
    with pytest.raises(OptionError, match=f"could not write with format 'nats_kv': {problem}"):
        validate_columns(StructType.fromDDL(ddl), "nats_kv")


def test_columns_of_stream(spark: SparkSession) -> None:
    validate_columns(
        StructType.fromDDL(columns_read("nats_stream", ("includeHeaders",))), "nats_stream"
    )
    validate_columns(StructType.fromDDL("data STRING, msg_id STRING"), "nats_stream")
    with pytest.raises(OptionError, match="column 'data' is missing"):
        validate_columns(StructType.fromDDL("subject STRING"), "nats_stream")
