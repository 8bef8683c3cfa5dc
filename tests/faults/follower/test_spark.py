"""Spark optimizes, deletes from and restores the table while the command `follow` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from tests.support.follower import QUERY, follow_once, following, version, written_bucket

pytestmark = [pytest.mark.faults, pytest.mark.delta]


def test_spark_optimizes_deletes_and_restores(
    spark: SparkSession, nats_server: NatsServer, tmp_path: Path
) -> None:
    url, table = nats_server.url, tmp_path / "table"
    sql_table = f"delta.`{table}`"
    writer = written_bucket(url, 200)
    with following(url, "b", table) as follower:
        follower.wait_for_rows(writer, QUERY)
        for _ in range(3):  # several files
            writer.write(50)
            follower.wait_for_rows(writer, QUERY)
        before = version(table)
        spark.sql(f"OPTIMIZE {sql_table}")
        assert version(table) > before
        writer.write(50)
        follower.wait_for_rows(writer, QUERY)

        # A row that another writer deletes comes back with the next entry of its key only.
        [key, *_] = [row[1] for row in QUERY.stored(table)]
        spark.sql(f"DELETE FROM {sql_table} WHERE key = '{key}'")
        assert [row[1] for row in writer.differences(QUERY, table)] == [key]
        writer.put(key)
        follower.wait_for_rows(writer, QUERY)

        before = version(table)
        writer.write(50)
        follower.wait_for_rows(writer, QUERY)
        spark.sql(f"RESTORE TABLE {sql_table} TO VERSION AS OF {before}")
        writer.write(5)
        follower.wait_for_rows(writer, QUERY)
        assert "starts again" in follower.errors
        assert follower.end() == 0, follower.errors
    before = version(table)
    writer.write(50)
    follow_once(url, "b", table)
    spark.sql(f"RESTORE TABLE {sql_table} TO VERSION AS OF {before}")
    assert writer.differences(QUERY, table)
    follow_once(url, "b", table)
    assert writer.differences(QUERY, table) == []
