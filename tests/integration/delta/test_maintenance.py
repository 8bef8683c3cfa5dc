"""Upkeep of a table: when it is due, its effects, and concurrent reads and writes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from pyspark.sql import SparkSession

from nats_stream_source.delta import maintain, merge
from nats_stream_source.delta.upkeep import MaintenanceResult, Upkeep
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.driver.in_process import InProcessTable, arrow
from tests.integration.delta.merge_model import Frame, live, put
from tests.support.delta import ENTRIES, age, rows_of

pytestmark = pytest.mark.delta
OLD = 8 * 24  # hours: older than Delta's limit of 7 days; VACUUM compares the time of the file


def create(table: Path, **properties: str) -> None:
    DeltaTable.create(table, Schema.from_arrow(ENTRIES), configuration=properties)


def replace_all(table: Path, revision: int) -> DeltaTable:
    write_deltalake(table, arrow([put("a", revision)]), mode="overwrite")
    return DeltaTable(table)


def maintained(table: Path, upkeep: Upkeep) -> MaintenanceResult:
    """Maintain a table in this process; it has no layout."""
    return InProcessTable(table).found.maintain(upkeep)


def data_files(table: Path) -> set[str]:
    return {path.name for path in table.glob("*.parquet")}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"compact_files": 0}, "compact_files is 0, expected an integer"),
        ({"target_file_bytes": None}, "target_file_bytes is None, expected an integer"),
        ({"vacuum_commits": 1.5}, "vacuum_commits is 1.5, expected an integer"),
        ({"retention_hours": 0}, "retention_hours is 0, expected an integer"),
        ({"log_retention_hours": True}, "log_retention_hours is True, expected an integer"),
        ({"checkpoint_commits": "10"}, "checkpoint_commits is '10', expected an integer"),
        # Spark refuses to create a table whose log is kept shorter than its files.
        ({"log_retention_hours": 24, "retention_hours": 48}, r"at least retention_hours \(48"),
    ],
)
def test_invalid_upkeep(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        Upkeep(**arguments)


def test_vacuum_due_at_multiples_of_versions() -> None:
    upkeep = Upkeep(vacuum_commits=10)
    assert [v for v in range(30) if upkeep.vacuum_due(v, v + 1)] == [9, 19, 29]
    assert upkeep.vacuum_due(5, 25)
    assert not upkeep.vacuum_due(10, 10)
    assert not Upkeep(vacuum_commits=None).vacuum_due(5, 25)


def test_vacuum_deletes_removed_files_after_their_retention(table: Path) -> None:
    """Also those that a checkpoint no longer names, and those of a commit that was interrupted."""
    create(table, **{"delta.deletedFileRetentionDuration": "interval 1 seconds"})
    replace_all(table, 1)
    replace_all(table, 2)
    (table / "part-of-no-version.parquet").write_bytes(b"x")
    time.sleep(1.1)  # the retention
    target = replace_all(table, 3)
    target.create_checkpoint()
    removed = data_files(table) - {Path(uri).name for uri in target.file_uris()}
    assert len(removed) == 3
    maintained(table, Upkeep())
    assert len(data_files(table)) == 2  # of versions 3 and 2, whose file was removed just now
    assert live(table) == {"a": 3}


@pytest.mark.parametrize("upkeep", [Upkeep(), Upkeep(retention_hours=24)])
def test_reader_of_older_version_keeps_its_files(table: Path, upkeep: Upkeep) -> None:
    """Of files that look 8 days old, those that were removed just now stay."""
    create(table)
    reader = replace_all(table, 1)
    replace_all(table, 2)
    age(table.glob("*.parquet"), OLD)
    assert maintained(table, upkeep).deleted == 0
    assert [row["revision"] for row in rows_of(reader)] == [1]


def test_retention_of_table_wins_if_longer(table: Path) -> None:
    create(table, **{"delta.deletedFileRetentionDuration": "interval 30 days"})
    (table / "part-of-no-version.parquet").write_bytes(b"x")
    age(table.glob("*.parquet"), OLD)
    maintained(table, Upkeep())
    assert data_files(table) == {"part-of-no-version.parquet"}
    asked = Upkeep(retention_hours=168)
    assert maintained(table, asked).deleted == 1
    assert data_files(table) == set()


@pytest.mark.faults  # VACUUM by Spark takes 10 s and more
def test_upkeep_by_spark(spark: SparkSession, table: Path) -> None:
    from nats_stream_source.delta.spark.table import SparkTable

    create(table)
    for number in range(4):
        write_deltalake(table, arrow([put(f"k{number}", 1)]), mode="append")
    target = SparkTable(spark, "t", str(table))
    assert target.exists()
    upkeep = Upkeep(compact_files=2, retention_hours=24)
    assert target.upkeep_after_commit(upkeep) == MaintenanceResult(4, 1)
    (table / "part-of-no-version.parquet").write_bytes(b"x")
    age(table.glob("*.parquet"), OLD)
    kept = data_files(table) - {"part-of-no-version.parquet"}
    target.maintain(upkeep)
    assert data_files(table) == kept
    # The session's settings are as before.
    assert spark.conf.get("spark.databricks.delta.retentionDurationCheck.enabled", "true") == "true"
    assert live(table) == dict.fromkeys(("k0", "k1", "k2", "k3"), 1)


def test_merges_maintain_their_table(spark: SparkSession, frame: Frame, table: Path) -> None:
    """When it is due; and a table that a merge creates has the properties."""
    retention = {"log_retention_hours": 3, "retention_hours": 2}
    upkeep = Upkeep(compact_files=1, vacuum_commits=2, checkpoint_commits=7, **retention)
    for revision in range(1, 4):
        merge(frame(put(f"k{revision}", revision)), str(table), engine="driver", upkeep=upkeep)
        merge(frame(put(f"k{revision}", revision)), str(table), engine="driver", upkeep=upkeep)
    target = DeltaTable(table)
    assert target.metadata().configuration == {
        "delta.enableDeletionVectors": "true",
        "delta.checkpointInterval": "7",
        "delta.logRetentionDuration": "interval 3 hours",
        "delta.deletedFileRetentionDuration": "interval 2 hours",
    }
    operations = [commit["operation"] for commit in target.history()]
    assert operations == ["OPTIMIZE", "MERGE", "OPTIMIZE", "MERGE", "MERGE", "CREATE TABLE"]
    assert len(target.file_uris()) == 1
    merge(frame(put("k4", 4)), str(table), engine="driver", upkeep=None)
    assert len(DeltaTable(table).file_uris()) == 2
    assert maintain(spark, str(table)) == MaintenanceResult(compacted=2, written=1)
    with pytest.raises(ConfigurationError, match=r"could not maintain table .*no Delta table"):
        maintain(spark, str(table.parent / "none"))
