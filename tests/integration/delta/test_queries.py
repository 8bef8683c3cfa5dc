"""Queries that follow buckets: a restored table, encoded keys."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from nats_stream_source.delta import follow, merge_changes, reconcile
from nats_stream_source.errors import ConfigurationError, KeyNotEncodableError
from tests.integration.delta.merge_model import Bucket, live, stored
from tests.support.delta import values
from tests.support.nats.buckets import api, put
from tests.support.query_driver.batch import read_batch
from tests.support.spark.streaming_query import run_to_the_end

pytestmark = pytest.mark.delta


def test_table_restored_from_backup(spark: SparkSession, bucket: Bucket, tmp_path: Path) -> None:
    """The table equals its bucket again, as docs/production.md describes."""
    table, checkpoint = tmp_path / "fleet", tmp_path / "checkpoint"

    def run(checkpoint: Path) -> None:
        source = spark.readStream.format("nats_kv").options(servers=bucket.url, bucket=bucket.name)
        query = follow(source.load(), str(table), checkpoint=str(checkpoint), once=True)
        assert query.awaitTermination(180)

    def restore(part: Path) -> None:
        shutil.rmtree(part)
        shutil.copytree(tmp_path / "backup" / part.name, part)

    bucket.write(("a", "PUT"), ("b", "PUT"))
    run(checkpoint)
    shutil.copytree(checkpoint, tmp_path / "backup" / checkpoint.name)
    bucket.write(("b", "PUT"), ("c", "PUT"), ("d", "PUT"))
    run(checkpoint)
    shutil.copytree(table, tmp_path / "backup" / table.name)
    bucket.write(("a", "DEL"), ("c", "PUT"))
    run(checkpoint)
    expected = {"b": 3, "c": 7, "d": 5}
    assert live(table) == expected

    restore(table)
    restore(checkpoint)  # older than the table: entries of the table are merged again
    run(checkpoint)
    assert live(table) == expected

    bucket.purge_subjects("d")  # without a marker
    restore(table)
    run(tmp_path / "new checkpoint")
    assert live(table) == expected
    reconcile(spark, str(table), bucket=bucket.name, servers=bucket.url)
    assert live(table) == {"b": 3, "c": 7}


CODECS = {"keyCodec": "base64", "valueCodec": "base64"}
KEYS = ["user:1", "user:2.name", "Ω b", "/a/"]


def test_table_follows_bucket_and_is_reconciled(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    frame = spark.createDataFrame([(key, key) for key in KEYS], "key STRING, value STRING")
    writer = frame.write.format("nats_kv").options(servers=url, bucket="people", **CODECS)
    writer.options(ifMissing="create", history="5").mode("append").save()
    same = {key: key.encode() for key in KEYS}
    read = read_batch(url, bucket="people", **CODECS)
    assert {row["key"]: row["value"] for row in read} == same
    put(url, "people", "dXNlcjox", b"bmV3")

    def follow_bucket(**options: str) -> None:
        source = spark.readStream.format("nats_kv").options(servers=url, bucket="people", **CODECS)
        read = source.options(includeRawKey="true", **options).load()
        assert read.columns[-1] == "raw_key"
        writer = read.writeStream.foreachBatch(merge_changes(str(table)))
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        run_to_the_end(writer.trigger(availableNow=True).start)

    follow_bucket()
    same["user:1"] = b"new"
    assert values(table) == same
    assert {row["raw_key"] for row in stored(table)} == {
        row["subject"].removeprefix("$KV.people.")
        for row in read_batch(url, stream="KV_people", deliverPolicy="last_per_subject")
    }
    put(url, "people", "dXNlcjox", b"", {"KV-Operation": "DEL"})
    follow_bucket()
    del same["user:1"]
    assert values(table) == same

    def reconciled(**more: str) -> tuple[int, int]:
        result = reconcile(spark, str(table), bucket="people", servers=url, **more)
        return result.removed, result.kept

    assert reconciled(key_codec="base64") == (0, 3)
    api(url, "STREAM.PURGE.KV_people", {"filter": "$KV.people.zqkgYg"})
    assert reconciled(key_codec="base64") == (1, 2)
    del same["Ω b"]
    assert values(table) == same
    with pytest.raises(ConfigurationError, match="key_codec is 'none', which is not a codec"):
        reconciled(key_codec="none")
    with pytest.raises(KeyNotEncodableError, match="could not reconcile table"):
        reconciled(key_codec="path,base64")
    put(url, "people", "plain", b"bmV3")  # not encoded
    with pytest.raises(PySparkException, match="1 entries have a null in one of bucket, key"):
        follow_bucket(onUndecodable="null")
