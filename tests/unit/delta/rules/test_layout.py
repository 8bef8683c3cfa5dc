"""The layout of a table and the arguments of a merge, and what contradicts them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.delta.rules.events import ChangeRules
from nats_stream_source.delta.rules.layout import (
    PROPERTY,
    SEQUENCE,
    UNAVAILABLE,
    Layout,
    layout_of,
    state_name,
)
from nats_stream_source.errors import ConfigurationError
from tests.support.cdc.events import RULES
from tests.support.delta import ENTRIES

HISTORY: dict[str, Any] = {**RULES, "stored_as_scd_type": 2}
COLUMNS = ("key", "seq", "op", "a", "b")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"column_list": ["a"], "except_column_list": ["b"]}, "column_list with except"),
        (
            {
                "stored_as_scd_type": 2,
                "track_history_column_list": ["a"],
                "track_history_except_column_list": ["b"],
            },
            "track_history_column_list with track_history_except",
        ),
        ({"track_history_column_list": ["a"]}, "with stored_as_scd_type=1"),
        ({"track_history_except_column_list": ["a"]}, "with stored_as_scd_type=1"),
        ({"stored_as_scd_type": 3}, "stored_as_scd_type is 3, expected 1 or 2"),
        ({"stored_as_scd_type": 2, "deletes": "mark"}, "deletes='mark' with stored_as_scd_type=2"),
        ({"deletes": "drop"}, "deletes is 'drop', expected 'remove' or 'mark'"),
        ({"keys": []}, "keys is empty"),
        ({"keys": ["a", "a"]}, "keys has 'a' twice"),
        ({"column_list": "a"}, "column_list is 'a', expected a list"),
        ({"sequence_by": []}, "sequence_by is \\[\\]"),
        ({"sequence_by": 5}, "sequence_by is 5"),
        ({"apply_as_deletes": ""}, "apply_as_deletes is ''"),
        ({**HISTORY, "unavailable_columns": "a"}, "unavailable_columns with stored_as_scd_type=2"),
        ({"unavailable_columns": ["a"]}, "unavailable_columns is .* expected the name"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        ChangeRules.of(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"keys": ["kei"]}, "keys has 'kei', which is not a column of it; did you mean 'key'"),
        ({"column_list": ["key", "c"], "except_column_list": None}, "column_list has 'c'"),
        ({"except_column_list": ["c"]}, "except_column_list has 'c'"),
        ({"except_column_list": ["key"]}, "the key 'key' is not a selected column"),
        ({**HISTORY, "track_history_column_list": ["x"]}, "track_history_column_list has 'x'"),
        ({**HISTORY, "track_history_except_column_list": ["x"]}, "except_column_list has 'x'"),
        ({**HISTORY, "track_history_except_column_list": ["op"]}, "not a selected column"),
        ({"column_list": ["a"], "except_column_list": None}, "the key 'key' is not a selected"),
        ({"keys": None}, "keys is missing"),
        ({"sequence_by": None}, "sequence_by is missing"),
        ({"unavailable_columns": "c"}, "unavailable_columns has 'c', which is not a column"),
    ],
)
def test_rules_that_do_not_fit_batch_are_refused(arguments: dict[str, Any], error: str) -> None:
    rules = ChangeRules.of(**{**RULES, **arguments})
    with pytest.raises(ConfigurationError, match=error):
        rules.validate_columns(COLUMNS)


@pytest.mark.parametrize(
    ("column", "kind", "error"),
    [
        ("key", pa.list_(pa.string()), r"the key 'key' is ARRAY<STRING>, expected a number"),
        (SEQUENCE, pa.map_(pa.int64(), pa.int64()), "MAP<BIGINT,BIGINT>, which cannot be ordered"),
        (SEQUENCE, pa.struct([("a", pa.list_(pa.int64()))]), "which cannot be ordered"),
        (UNAVAILABLE, pa.int64(), "unavailable_columns is a column of type BIGINT"),
    ],
)
def test_type_of_events_is_refused(column: str, kind: pa.DataType, error: str) -> None:
    kinds = {"key": pa.string(), SEQUENCE: pa.int64(), UNAVAILABLE: pa.list_(pa.string())}
    layout = Layout(1, ("key",), "", (SEQUENCE,), "remove", times=False)
    layout.validate_events(pa.schema(list(kinds.items())), ["key"])
    with pytest.raises(ConfigurationError, match=error):
        layout.validate_events(pa.schema(list({**kinds, column: kind}.items())), ["key"])


@pytest.mark.parametrize("column", ["key", "revision", "operation", "stream_created"])
def test_missing_column_of_entries_is_named(column: str) -> None:
    columns = [name for name in ENTRIES.names if name != column]
    with pytest.raises(ConfigurationError, match=f"it has no column '{column}'|keys is missing"):
        ChangeRules.of().validate_columns(columns)


def test_own_column_deleted_of_entries_is_refused_with_marks() -> None:
    columns = [*ENTRIES.names, "Deleted"]
    ChangeRules.of().validate_columns(columns)
    schema = ENTRIES.append(pa.field("Deleted", pa.bool_()))
    Layout.of_entries(ENTRIES.names, "remove").verify("lake", None, schema, columns)
    with pytest.raises(ConfigurationError, match="its own column 'Deleted'"):
        ChangeRules.of(deletes="mark").validate_columns(columns)


@pytest.mark.parametrize(
    ("name", "scd_type", "times", "deletes"),
    [
        *((name, 2, False, "remove") for name in ("__START_AT", "__end_at")),
        *((name, 1, False, "remove") for name in ("__Sequence", "__delete", "__TIME")),
        ("__Unavailable", 1, False, "remove"),
        ("deleted", 1, False, "mark"),
        *((name, 2, True, "remove") for name in ("valid_from", "Valid_To")),
    ],
)
def test_reserved_column_is_refused(name: str, scd_type: int, times: bool, deletes: Any) -> None:
    events = pa.schema([("key", pa.string()), (SEQUENCE, pa.int64()), (name, pa.int64())])
    layout = Layout(scd_type, ("key",), "bigint", (SEQUENCE,), deletes, times)
    with pytest.raises(ConfigurationError, match=f"column '{name}'.* is reserved"):
        layout.validate_events(events, ["key", name])


@pytest.mark.parametrize(
    ("column", "kind", "expected"),
    [
        ("revision", pa.string(), "STRING, expected BIGINT, another integer or DECIMAL"),
        ("revision", pa.float32(), "FLOAT, expected BIGINT"),
        ("revision", pa.decimal128(20, 2), r"DECIMAL\(20,2\), expected BIGINT"),
        ("stream_created", pa.date32(), "DATE, expected TIMESTAMP or TIMESTAMP_NTZ"),
        ("stream_created", pa.string(), "STRING, expected TIMESTAMP"),
        ("operation", pa.int32(), "INT, expected STRING"),
        ("revision", pa.int16(), None),
        ("revision", pa.decimal128(20, 0), None),
        ("stream_created", pa.timestamp("us"), None),
    ],
)
def test_type_of_order_of_entries_is_exact(
    column: str, kind: pa.DataType, expected: str | None
) -> None:
    """Texts would be ordered by their digits, and a FLOAT or DATE rounds."""
    schema = ENTRIES.set(ENTRIES.names.index(column), pa.field(column, kind))
    layout = Layout.of_entries(schema.names, "remove")
    if expected is None:
        layout.validate_events(schema, schema.names)
        layout.verify("lake", None, schema, schema.names)
        return
    for check in (
        lambda: layout.validate_events(schema, schema.names),
        lambda: layout.verify("lake", None, schema, schema.names),
    ):
        with pytest.raises(ConfigurationError, match=f"column '{column}' is {expected}"):
            check()


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
        (ENTRY, None, ENTRIES.remove(5), ENTRIES.names, "no column 'operation'"),
        (MARK, None, ENTRIES, ENTRIES.names, "no column 'deleted'"),
        (ENTRY, None, MARK.table_schema(ENTRIES), ENTRIES.names, "it has a column 'deleted'"),
        (ENTRY, None, ENTRIES, ENTRIES.names[1:], "the batch has no column 'bucket'"),
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
