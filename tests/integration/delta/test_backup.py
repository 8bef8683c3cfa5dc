"""A table that is restored from a copy equals its bucket again, as docs/production.md describes."""

from __future__ import annotations

import shutil
from pathlib import Path

from pyspark.sql import SparkSession

from nats_stream_source.delta import follow, reconcile
from tests.integration.delta.kv_bucket import Bucket
from tests.integration.delta.table_content import live


def test_table_restored_from_backup(spark: SparkSession, bucket: Bucket, tmp_path: Path) -> None:
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
