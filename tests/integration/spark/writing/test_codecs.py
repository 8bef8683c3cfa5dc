"""Encoded keys and values written by Spark, and copied by a query into other codecs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
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
