"""The history of a bucket's entries: versions with their times, reconcile and maintain."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from nats_stream_source.delta import Engine, Upkeep, maintain
from nats_stream_source.delta import merge as merge_batch
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.kv_bucket import Bucket, Reconciled
from tests.integration.delta.merge_model import (
    Entry,
    Frame,
    Merge,
    by_driver,
    delete,
    put,
    spark_in_faults,
)
from tests.support.delta import rows_of
from tests.support.paths import ROOT

pytestmark = pytest.mark.delta
PAGE = (ROOT / "docs" / "delta.md").read_text()
TUESDAY, CHANGES = re.findall(r'history\.execute\("""\n(.*?)"""\)', PAGE, re.DOTALL)


def versions(table: Path) -> list[tuple[Any, ...]]:
    """Return key, value, start and end by revision, and the times of each version."""
    rows = [
        (
            row["key"],
            row["value"],
            row["__START_AT"]["revision"],
            row["__END_AT"] and row["__END_AT"]["revision"],
            row["valid_from"],
            row["valid_to"],
        )
        for row in rows_of(DeltaTable(table))
    ]
    return sorted(rows, key=lambda row: (row[0], row[2]))


def as_of(table: Path, time: datetime) -> dict[str, bytes]:
    """Return the values at a time, by the query of the documentation."""
    query = TUESDAY.replace("2026-11-24T12:00:00Z", time.strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
    assert query != TUESDAY
    rows = QueryBuilder().register("fleet", DeltaTable(table)).execute(query)
    return {row["key"]: row["value"].encode() for row in pa.table(rows).to_pylist()}


@spark_in_faults
def test_history_has_versions_with_times_of_entries(
    frame: Frame, table: Path, merge: Merge
) -> None:
    first, same, second = put("a", 1), put("a", 3, value=b"a@1"), put("a", 5)
    removed, again = delete("a", 7), put("a", 9, value=b"a@5")
    other = put("b", 2)
    log: list[list[Entry]] = [[first, other], [same, second], [removed], [again, first, same]]
    for batch in log:
        merge(frame(*batch), str(table), stored_as_scd_type=2)
    assert versions(table) == [
        ("a", b"a@1", 1, 5, first.created, second.created),
        ("a", b"a@5", 5, 7, second.created, removed.created),
        ("a", b"a@5", 9, None, again.created, None),
        ("b", b"b@2", 2, None, other.created, None),
    ]
    assert as_of(table, second.created) == {"a": b"a@5", "b": b"b@2"}
    assert as_of(table, removed.created) == {"b": b"b@2"}
    day, next_day = (f"{first.created.date() + timedelta(days)}" for days in (0, 1))
    query = CHANGES.replace("2026-11-24", day).replace("2026-11-25", next_day)
    changed = QueryBuilder().register("fleet", DeltaTable(table)).execute(query)
    assert len(pa.table(changed)) == 4


@spark_in_faults
def test_reconcile_closes_open_rows_of_missing_keys(
    frame: Frame, table: Path, bucket: Bucket, merge: Merge, reconciled: Reconciled
) -> None:
    read = bucket.write(*((key, "PUT") for key in ("a", "b", "c", "d")))
    again = bucket.write(("a", "PUT"))  # the same value: an entry that the rows do not show
    merge(frame(*read, *again), str(table), stored_as_scd_type=2)
    bucket.write(("b", "DEL"), ("d", "PUT"))
    bucket.purge_subjects("a", "d")
    last_seq = bucket.state()["last_seq"]
    result = reconciled()
    assert (result.removed, result.kept, result.changed, result.last_seq) == (3, 1, 0, last_seq)
    ends = {row[0]: row[3] for row in versions(table)}
    assert ends == {"a": last_seq + 1, "b": 6, "c": None, "d": last_seq + 1}
    values = {row["key"]: (row["value"], row["revision"]) for row in rows_of(DeltaTable(table))}
    assert values == {"a": (b"x", 5), "b": (b"x", 2), "c": (b"x", 3), "d": (b"x", 4)}
    before = DeltaTable(table).version()
    assert reconciled().removed == 0
    assert DeltaTable(table).version() == before


@by_driver
def test_reconcile_refuses_table_with_other_sequence(
    frame: Frame, table: Path, merge: Merge, reconciled: Reconciled
) -> None:
    merge(frame(put("a", 1)), str(table), sequence_by="created")
    with pytest.raises(ConfigurationError, match="expected those of a bucket's entries"):
        reconciled()


@spark_in_faults
def test_maintain_compacts_table_and_state(
    spark: SparkSession, frame: Frame, table: Path, engine: Engine
) -> None:
    state = table.with_name("fleet__cdc_state")
    for number in range(1, 5):
        batch = [put(f"key {number}", number), delete(f"gone {number}", number)]
        merge_batch(frame(*batch), str(table), stored_as_scd_type=2, upkeep=None, engine=engine)
    rows, recorded = versions(table), rows_of(DeltaTable(state))
    assert len(DeltaTable(state).file_uris()) == len(recorded) == 4
    result = maintain(spark, str(table), engine=engine, upkeep=Upkeep(retention_hours=1000))
    assert (result.compacted, result.written) == (8, 2)
    assert len(DeltaTable(table).file_uris()) == len(DeltaTable(state).file_uris()) == 1
    assert versions(table) == rows
