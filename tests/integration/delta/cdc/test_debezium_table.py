"""Debezium's events in a Delta table, merged by each engine and by all in turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.delta import debezium_changes
from tests.integration.delta.cdc.test_debezium import CUSTOMERS, ROWS, read_events
from tests.integration.delta.merge_model import Merge, spark_in_faults
from tests.integration.delta.table_content import columns_of

pytestmark = pytest.mark.delta

RULES: dict[str, Any] = {
    "keys": ["id"],
    "sequence_by": ["_lsn", "_sequence"],
    "apply_as_deletes": "_operation = 'd'",
    "unavailable_columns": "_unavailable",
    "except_column_list": ["_operation"],
}
Events = list[tuple[str, str, int]]


@pytest.fixture
def changes_of(spark: SparkSession) -> Callable[[Events, str], DataFrame]:
    """Function that returns the changes of some events, for a table with some columns."""

    def changes(events: Events, schema: str) -> DataFrame:
        messages = spark.createDataFrame(events, "subject STRING, data STRING, sequence BIGINT")
        found, corrupt = debezium_changes(messages, schema, keys=["id"])
        assert corrupt.isEmpty()
        return found

    return changes


@spark_in_faults
def test_table_equals_rows_of_database(
    changes_of: Callable[[Events, str], DataFrame], table: Path, merge: Merge
) -> None:
    events = read_events("key-tombstone-msgid-tx")
    # After a crash, the connector publishes events again, and the query reads some again.
    again = [(subject, data, sequence + 1000) for subject, data, sequence in events[10:30]]
    batches = [events[:20], events[15:], again]
    for batch in batches:
        merge(changes_of(batch, CUSTOMERS), str(table), **RULES)

    rows = columns_of(table, "id", "name", "email", "phone")
    assert {row[0]: row[1:] for row in rows} == ROWS


def test_table_keeps_unavailable_values(
    changes_of: Callable[[Events, str], DataFrame], table: Path, merge: Merge
) -> None:
    created, updated = read_events("types", "dbz.public.types")
    value = json.loads(created[1])["after"]["big"]
    again = updated[1].replace('"f":1.5', '"f":2.5').replace('"lsn":39085296', '"lsn":39085297')
    other = created[1].replace('"id":1,', '"id":2,').replace('"lsn":39084816', '"lsn":39084817')

    for batch in (
        [created, (created[0], other, 4)],
        [updated],
        [(updated[0], again, 6), (updated[0], other, 5)],
    ):
        changes = changes_of(batch, "id INT, f DOUBLE, big STRING")
        merge(changes, str(table), **RULES)

    assert columns_of(table, "id", "f", "big") == [(1, 2.5, value), (2, 0.5, value)]
