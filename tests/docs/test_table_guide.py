"""docs/table.md: what a new table has, its readers, and the way out to its end."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

from nats_stream_source.delta import merge
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/table.md").read_text()
(READERS,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
WAY_OUT, MERGE = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
FEATURES = {"deletionVectors", "appendOnly", "invariants"}
RULE = "nats_stream_source.cdc"


def table_of(spark: SparkSession, path: Path, **arguments: Any) -> DeltaTable:
    """A table of keys k0 to k9, of which k1 was updated and k2 deleted by a second batch."""
    columns = "key STRING, value BINARY, revision BIGINT, deleted BOOLEAN"
    given = {
        "keys": ["key"],
        "sequence_by": "revision",
        "apply_as_deletes": "deleted",
        "except_column_list": ["deleted"],
        **arguments,
    }
    first = [(f"k{i}", b"old", i + 1, False) for i in range(10)]
    for rows in (first, [("k1", b"new", 20, False), ("k2", None, 21, True)]):
        merge(spark.createDataFrame(rows, columns), str(path), **given)
    return DeltaTable(path)


@pytest.mark.delta
def test_new_table_has_features_and_properties_of_page(spark: SparkSession, tmp_path: Path) -> None:
    protocol = table_of(spark, tmp_path / "fleet").protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (3, 7)
    assert {*protocol.reader_features, *protocol.writer_features} == FEATURES
    properties = DeltaTable(tmp_path / "fleet").metadata().configuration
    assert properties.keys() == {
        "delta.enableDeletionVectors",
        "delta.deletedFileRetentionDuration",
        "delta.logRetentionDuration",
        "delta.checkpointInterval",
        RULE,
    }
    assert all(f"`{name}`" in PAGE for name in {*FEATURES, "delta.checkpointInterval", RULE})
    plain = table_of(spark, tmp_path / "plain", deletion_vectors=False).protocol()
    assert (plain.min_reader_version, plain.min_writer_version) == (1, 2)


@pytest.mark.delta
def test_readers_of_page_return_rows(spark: SparkSession, tmp_path: Path) -> None:
    table_of(spark, tmp_path / "fleet")
    names: dict[str, Any] = {"spark": spark}
    exec(READERS.replace("/lake/", f"{tmp_path}/"), names)
    expected = {f"k{i}" for i in range(10) if i != 2}
    assert {row["key"] for row in pa.table(names["by_deltalake"]).to_pylist()} == expected
    assert set(names["by_polars"]["key"]) == expected
    assert {row[0] for row in names["by_duckdb"]} == expected
    assert {row.key for row in names["by_spark"].collect()} == expected


@pytest.mark.delta
def test_way_out_leads_to_plain_table(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "fleet"
    table_of(spark, path, stored_as_scd_type=1)

    def run(statements: str) -> None:
        for statement in statements.replace("/lake/", f"{tmp_path}/").split(";"):
            if statement.strip():
                spark.sql(statement)

    assert DeltaTable(path).protocol().reader_features == ["deletionVectors"]
    run(WAY_OUT)
    shutil.rmtree(tmp_path / "fleet__cdc_state")
    table = DeltaTable(path)
    assert table.protocol().reader_features is None
    assert RULE not in table.metadata().configuration
    assert len(table_values(path)) == 9
    changes = [("k1", None, 30), ("k3", b"newer", 31), ("k11", b"first", 32)]
    columns = "key STRING, value BINARY, revision BIGINT"
    spark.createDataFrame(changes, columns).createOrReplaceTempView("changes")
    run(MERGE)
    values = dict(table_values(path))
    assert values.keys() == {"k0", "k3", "k11", *(f"k{i}" for i in range(4, 10))}
    assert (values["k3"], values["k11"]) == (b"newer", b"first")
    with pytest.raises(DeltaError, match="checkpointProtection"):
        write_deltalake(path, table.to_pyarrow_table(), mode="append")


def table_values(path: Path) -> list[tuple[str, bytes]]:
    """Keys and values by the reader that refuses deletion vectors."""
    rows = DeltaTable(path).to_pandas()
    return list(zip(rows["key"], rows["value"], strict=True))
