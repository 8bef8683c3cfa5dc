"""A disk that fills up during a merge by the driver: the table stays, and a later merge works."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.delta import merge
from nats_stream_source.errors import TableError
from tests.integration.delta.merge_model import SCHEMA, put
from tests.integration.delta.table_content import stored, version
from tests.support.nats.tmpfs import small_disk

pytestmark = [pytest.mark.faults, pytest.mark.delta]


def test_table_disk_full(spark: SparkSession, tmp_path: Path) -> None:
    def batch(revision: int, size: int) -> None:
        value = bytes(index * 7 % 251 for index in range(size))
        entry = put("a", revision, value=value * 64)
        merge(spark.createDataFrame([entry.row()], SCHEMA), str(table), engine="driver")

    disk = tmp_path / "disk"
    with small_disk(disk, 2) as resize:
        table = disk / "table"
        batch(1, 100)
        before, rows = version(table), stored(table)
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(b"x" * (4 << 20))
        with pytest.raises(TableError, match=r"could not merge .*[Nn]o space left.*unchanged"):
            batch(2, 100)
        assert (version(table), stored(table)) == (before, rows)
        resize(16)
        batch(2, 100)
        assert [row["revision"] for row in stored(table)] == [2]
