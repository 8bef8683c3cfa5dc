"""What reads a table with deletion vectors that the driver wrote, and what refuses it.

The rows are in two partitions. Vectors were written before and after a compaction and a checkpoint
of the log. The data files of the checkpoint have tags. The statistics of the driver's data files
are those of Delta's own writer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaProtocolError
from pyspark.sql import SparkSession

from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.driver.upkeep import compact
from tests.integration.delta.driver.in_process import InProcessTable, arrow
from tests.integration.delta.merge_model import Entry, delete, put
from tests.support.delta import change_actions, partition_by
from tests.support.delta_readers import by_deltalake, by_duckdb, by_polars

_TAGS = {"INSERTION_TIME": "1700000000000000", "VORDER": "true"}  # of Databricks and Fabric
_ENCODED = "ü %: 1/2="  # a partition whose directory's name is percent-encoded

Row = dict[str, Any]


def write(path: Path, other: str = "ships") -> None:
    """Write a table with the partitions "fleet" and ``other`` by the driver."""
    table, buckets = InProcessTable(path, vectors=True), ("fleet", other)

    def merge(entries: Iterable[Entry]) -> None:
        of_buckets = [Entry(**{**vars(one), "bucket": of}) for one in entries for of in buckets]
        table.merge(*of_buckets)

    merge([])
    partition_by(path, "bucket")
    table.reopen()
    merge(put(f"k{n}", n + 1) for n in range(10))
    merge((delete if n % 3 else put)(f"k{n}", n + 30) for n in range(0, 10, 2))
    for bucket in buckets:
        files = table.state.files.items()
        of_bucket = [n for n, file in files if file.add["partitionValues"]["bucket"] == bucket]
        compact(table.state, of_bucket, 1 << 20)
    change_actions(path, "add", lambda add: add.update(tags=_TAGS))
    DeltaTable(path).create_checkpoint()
    table.table.close()
    merge((delete if n % 5 else put)(f"k{n}", n + 60) for n in range(3, 7))
    written = sorted((file for _, file in table.state.files.items()), key=lambda file: file.rows)
    for file in written[-2:]:  # the compacted file of each partition
        assert "deletionVector" in file.add
        assert file.add["tags"] == _TAGS


def expect(rows: list[Row], other: str) -> None:
    found = sorted((row["bucket"], row["key"], row["revision"]) for row in rows)
    of_each = [("k0", 30), ("k1", 2), ("k5", 65), ("k7", 8), ("k9", 10)]
    assert found == [(bucket, *row) for bucket in ("fleet", other) for row in of_each]


@pytest.mark.parametrize(
    ("read", "other"), [(by_deltalake, _ENCODED), (by_duckdb, _ENCODED), (by_polars, "ships")]
)
def test_reader_returns_rows(path: Path, read: Callable[[Path], list[Row]], other: str) -> None:
    write(path, other)
    expect(read(path), other)


def test_polars_returns_removed_rows_of_encoded_partition(path: Path) -> None:
    """A limitation of polars 2.1 that docs/table.md describes: it does not find the vectors."""
    write(path, _ENCODED)
    found = by_polars(path)
    assert len(found) > 10
    assert {row["bucket"] for row in found} == {"fleet", _ENCODED}


@pytest.mark.delta
@pytest.mark.faults
def test_spark_returns_rows(spark: SparkSession, path: Path) -> None:
    write(path, _ENCODED)
    rows = spark.read.format("delta").load(str(path)).collect()
    expect([row.asDict() for row in rows], _ENCODED)


@pytest.mark.parametrize("method", ["to_pyarrow_table", "to_pandas", "to_pyarrow_dataset"])
def test_pyarrow_reader_of_deltalake_refuses_table(path: Path, method: str) -> None:
    write(path)
    read = getattr(DeltaTable(path), method)
    with pytest.raises(DeltaProtocolError, match=r"reader features: \{'deletionVectors'\}"):
        read()


_COLUMNS = """
named_struct('i', id, 'n', named_struct('t', timestamp'2026-01-01 00:00:00.5')) AS s,
cast(id AS TINYINT) AS b, cast(id AS SMALLINT) AS sm, cast(id AS INT) AS i, id - 1 AS l,
cast(id + 0.1 AS FLOAT) AS f, id / 3 AS d, cast(id + 0.25 AS DECIMAL(10,2)) AS de,
cast(id * 100000 AS DECIMAL(38,3)) AS wide, id = 1 AS bo, date'2026-02-03' AS da,
timestamp'2026-01-01 10:00:00' AS ts, timestamp_ntz'2026-01-01 10:00:00.123' AS ntz,
cast(cast(id AS STRING) AS BINARY) AS bi, concat('text', id) AS st, if(id = 1, NULL, 'x') AS nu,
array(id) AS ar, if(id = 0, NULL, map('a', id)) AS ma, cast(NULL AS STRING) AS no,
concat(repeat('l', 40), id) AS lo
"""


def statistics_of(path: Path) -> dict[str, Any]:
    state = TableStorage(str(path), str(path)).read_existing()
    (add,) = state.files.values()
    values: dict[str, Any] = json.loads(add["stats"])
    return values


@pytest.mark.delta
def test_statistics_equal_those_of_spark(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.sql(f"SELECT {_COLUMNS} FROM range(3)").coalesce(1)
    frame.write.format("delta").save(str(tmp_path / "spark"))
    rows = frame.toArrow()
    table = InProcessTable(tmp_path / "own", vectors=False)
    entries = arrow([put(f"k{number}", number) for number in range(3)])
    for name in rows.column_names:
        entries = entries.append_column(name, rows[name])
    table.merge_rows(entries.select([*rows.column_names, *entries.column_names[:7]]))
    own, expected = statistics_of(tmp_path / "own"), statistics_of(tmp_path / "spark")
    for kind in ("minValues", "maxValues", "nullCount"):
        of_own = {name: value for name, value in own[kind].items() if name in rows.column_names}
        # A text of more than 32 characters does not bound the file above; Delta lengthens it.
        if kind == "maxValues":
            del expected[kind]["lo"]
        assert of_own == expected[kind]
    assert own["numRecords"] == expected["numRecords"] == 3
