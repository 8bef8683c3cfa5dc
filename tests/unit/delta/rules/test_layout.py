"""The layout of a table: its property, what it stores, and what is compared with a call."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from nats_stream_source.delta.rules.layout import PROPERTY, SEQUENCE, Layout, layout_of, state_name
from nats_stream_source.errors import ConfigurationError

TIME = pa.timestamp("us", tz="UTC")
ENTRIES = pa.schema(
    [
        ("bucket", pa.string()),
        ("key", pa.string()),
        ("revision", pa.int64()),
        ("operation", pa.string()),
        ("stream_created", TIME),
    ]
)
LAYOUT = Layout(1, ("id",), "bigint", (SEQUENCE,), "remove", times=False)
TEXT = (
    '{"scd_type":1,"keys":["id"],"sequence":"bigint","order":["__SEQUENCE"],"deletes":"remove",'
    '"times":false,"table_id":""}'
)


def test_property_of_layout_unchanged() -> None:
    assert LAYOUT.properties == {PROPERTY: TEXT}
    assert Layout.of({PROPERTY: TEXT}) == LAYOUT


def test_table_of_entries_without_property() -> None:
    layout = Layout.of_entries(ENTRIES.names, "mark")
    assert layout.properties == {}
    assert layout.keys == ("bucket", "key")
    assert not layout.has_state
    marked = layout.table_schema(ENTRIES)
    assert marked.names == [*ENTRIES.names, "deleted"]
    for schema, deletes in ((ENTRIES, "remove"), (marked, "mark")):
        found = layout_of({}, schema)
        assert found is not None
        assert (found.entries, found.keys, found.deletes) == (True, layout.keys, deletes)
    assert layout_of({}, pa.schema([("id", pa.int64())])) is None
    assert layout_of({PROPERTY: TEXT}, ENTRIES) == LAYOUT


ENTRY = Layout.of_entries(ENTRIES.names, "remove")
MARK = Layout.of_entries(ENTRIES.names, "mark")


@pytest.mark.parametrize(
    ("layout", "stored", "schema", "batch", "problem"),
    [
        (ENTRY, LAYOUT, ENTRIES, None, "created with stored_as_scd_type=1 and keys=..id"),
        (LAYOUT, None, ENTRIES, None, "was not created with keys and sequence_by"),
        (LAYOUT, replace(LAYOUT, scd_type=2), None, None, "stored_as_scd_type 2, and this call"),
        (LAYOUT, replace(LAYOUT, keys=("id", "n")), None, None, "created with keys"),
        (LAYOUT, replace(LAYOUT, sequence="int"), None, None, "a sequence_by of type 'int'"),
        (LAYOUT, replace(LAYOUT, order=("n",)), None, None, "its sequence in columns"),
        (LAYOUT, replace(LAYOUT, deletes="mark"), None, None, "created with deletes 'mark'"),
        (LAYOUT, replace(LAYOUT, times=True), None, None, "have the columns 'valid_from'"),
        (ENTRY, None, ENTRIES.remove(3), ENTRIES.names, "no column 'operation'"),
        (MARK, None, ENTRIES, ENTRIES.names, "no column 'deleted'"),
        (ENTRY, None, MARK.table_schema(ENTRIES), ENTRIES.names, "it has a column 'deleted'"),
        (ENTRY, None, ENTRIES, ENTRIES.names[1:], "the batch has no column 'bucket'"),
        (
            ENTRY,
            None,
            ENTRIES.set(2, pa.field("revision", pa.string())),
            ENTRIES.names,
            "column 'revision' is STRING, expected BIGINT",
        ),
        (
            MARK,
            None,
            MARK.table_schema(ENTRIES).append(pa.field("n", pa.int64(), nullable=False)),
            ENTRIES.names,
            "column 'n' is NOT NULL, and null in the row of a deleted key",
        ),
        (
            ENTRY,
            None,
            ENTRIES.set(
                1, pa.field("key", pa.string(), metadata={"__CHAR_VARCHAR_TYPE_STRING": "char(3)"})
            ),
            ENTRIES.names,
            r"column 'key', which is CHAR\(3\)",
        ),
    ],
)
def test_table_of_other_layout_refused(
    layout: Layout,
    stored: Layout | None,
    schema: pa.Schema | None,
    batch: list[str] | None,
    problem: str,
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        layout.verify("lake", stored, schema or pa.schema([]), batch)


def test_own_column_deleted_kept_with_removed_deletes() -> None:
    schema = ENTRIES.append(pa.field("deleted", pa.bool_()))
    ENTRY.verify("lake", None, schema, schema.names)


@pytest.mark.parametrize(
    ("table", "state"),
    [
        ("/lake/fleet", "/lake/fleet__cdc_state"),
        ("/lake/fleet/", "/lake/fleet__cdc_state"),
        ("/lake/fleet\\", "/lake/fleet__cdc_state"),
        ("s3://lake/fleet", "s3://lake/fleet__cdc_state"),
        ("lake.fleet", "lake.fleet__cdc_state"),
        ("delta.`/lake/fleet/`", "delta.`/lake/fleet__cdc_state`"),
    ],
)
def test_state_table_beside_table(table: str, state: str) -> None:
    assert state_name(table) == state
