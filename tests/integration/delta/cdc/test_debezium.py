"""Debezium's events become changed rows: the events that Debezium 3.6.3 sent, and invalid ones."""

from __future__ import annotations

import json
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

from nats_stream_source.delta import debezium_changes
from nats_stream_source.errors import ConfigurationError
from tests.integration.delta.merge_model import Merge, columns_of, spark_in_faults

EVENTS = Path(__file__).with_name("debezium_events")
"""Events as Debezium published them: from ``debezium_changes``'s point of view, facts.

``debezium-server-default``, ``key-tombstone-msgid-tx``, ``snapshot-edge`` and ``types`` are of
tables with Debezium's default settings, ``toast`` has ISO times and decimals as strings.
"""

CUSTOMERS = "id INT, name STRING, email STRING, updated_at TIMESTAMP, phone STRING"

# The rows in Postgres after the statements that led to the events.
ROWS = {
    1: ("Ann", "ann@example.org", None),
    2: ("Bob", "bob@example.org", None),
    20: ("Dan", "dan@example.org", None),
    30: ("F", "f@x", None),
    31: ("G", "g@x", None),
    32: ("H", "h@x", None),
    40: ("A-first", None, None),
    41: ("B-middle", None, None),
    42: ("A-last", None, None),
}


def read_events(name: str, subject: str | None = None) -> list[tuple[str, str, int]]:
    lines = (EVENTS / f"{name}.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [
        (event["subject"], event["data"], event["sequence"])
        for event in events
        if subject is None or event["subject"] == subject
    ]


@pytest.fixture
def messages(spark: SparkSession) -> Any:
    def make(events: list[tuple[str, str | None, int]]) -> DataFrame:
        frame = spark.createDataFrame(events, "subject STRING, data STRING, sequence BIGINT")
        return frame.withColumn("data", frame.data.cast("binary"))

    return make


def event(op: str, after: Any = None, before: Any = None, **fields: Any) -> str:
    envelope = {"op": op, "before": before, "after": after, "source": {"lsn": 100}, "ts_ms": 1}
    return json.dumps({**envelope, **fields})


def test_values_have_declared_types_and_unavailable_ones_are_named(messages: Any) -> None:
    schema = (
        "id INT, tz TIMESTAMP, ts TIMESTAMP_NTZ, d DATE, nm DECIMAL(10,2), f DOUBLE, b BOOLEAN, "
        "u STRING, iv BIGINT, bt BINARY, x INT, n DECIMAL(38,0), j STRING, by BINARY, "
        "ai ARRAY<INT>, at ARRAY<STRING>, al ARRAY<BIGINT>, au ARRAY<STRING>, h STRING, "
        "big STRING, aby ARRAY<BINARY>"
    )
    changes, corrupt = debezium_changes(messages(read_events("toast")), schema, keys=["id"])

    (row,) = changes.collect()
    assert corrupt.count() == 0
    # The Python driver of Spark gives naive local times for TIMESTAMP.
    assert row.tz.astimezone(timezone.utc) == datetime(
        2026, 2, 1, 10, 0, 0, 123456, tzinfo=timezone.utc
    )
    assert row.ts == datetime(2026, 2, 1, 12, 0, 0, 123456)
    assert (row.d, row.nm, row.b, row.iv) == (date(2026, 2, 1), Decimal("12.30"), True, 86400000000)
    assert row.f != row.f, "NaN"
    assert (row.x, bytes(row.bt)) == (1, b"\x05")
    unavailable = ["n", "j", "by", "ai", "at", "al", "au", "h", "big", "aby"]
    assert row._unavailable == unavailable
    assert [row[name] for name in unavailable] == [None] * len(unavailable)


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        ("TIMESTAMP", 1769940000123456, None),
        ("TIMESTAMP", "10:20:30Z", None),
        ("TIMESTAMP", "2026-02-01T10:00:00.5Z", "2026-02-01 10:00:00.5"),
        ("TIMESTAMP_NTZ", 1769940000, None),
        ("TIMESTAMP_NTZ", "2026-02-01T10:00:00Z", "2026-02-01 10:00:00"),
        ("TIMESTAMP_NTZ", "2026-02-01T10:00:00.5", "2026-02-01 10:00:00.5"),
        ("TIMESTAMP_NTZ", "2026-02-01T10:00:00+02:00", None),
        ("TIMESTAMP_NTZ", "2026-02-01T10:00:00 Europe/Berlin", None),
        ("DATE", 20485, None),
        ("DATE", "2026-02-01T22:00:00", None),
        ("DATE", "2026-02-01T22:00:00Z", None),
        ("DATE", "2026-02-01Z", "2026-02-01"),
        ("DECIMAL(12,2)", "1234", None),
        ("DECIMAL(12,2)", "12341234", None),
        ("DECIMAL(12,2)", "1234.00", "1234.00"),
        ("DECIMAL(12,2)", 12.5, "12.50"),
        ("DECIMAL(12,2)", "12", "12.00"),
        ("DECIMAL(12,0)", "1234", "1234"),
        ("FLOAT", 1e300, None),
        ("FLOAT", "Infinity", "Infinity"),
        ("FLOAT", 1.5, "1.5"),
        ("ARRAY<TIMESTAMP>", ["2026-02-01T10:00:00Z", 5], None),
        ("ARRAY<TIMESTAMP>", ["2026-02-01T10:00:00Z", None], "[2026-02-01 10:00:00, null]"),
        ("ARRAY<DECIMAL(12,2)>", ["1.00", "1234"], None),
        ("ARRAY<FLOAT>", [1.5, 1e300], None),
        ("ARRAY<FLOAT>", [1.5, None, "Infinity"], "[1.5, null, Infinity]"),
        ("BIGINT", 1769940000123456, "1769940000123456"),
        # The Base64 of a NUMERIC, in the mode "precise", or another type.
        ("BIGINT", "1234", None),
        ("INT", "1234", None),
        ("INT", 1.5, None),
        ("DOUBLE", "1234", None),
        ("DOUBLE", "NaN", "NaN"),
        ("DOUBLE", 1, "1.0"),
        ("FLOAT", "1234", None),
        ("BOOLEAN", 1, None),
        ("BOOLEAN", "t", None),
        ("BOOLEAN", "no", None),
        ("BOOLEAN", False, "false"),
        ("BINARY", 1234, None),
        ("BINARY", True, None),
        ("BINARY", "YWI=", "6162"),
        ("BINARY", "MTIz", "313233"),
        ("BINARY", "1234", "D76DF8"),  # a Base64 that is like a number, or another value
        ("BINARY", "true", "B6BB9E"),
        ("ARRAY<BIGINT>", [1, "1234"], None),
        ("ARRAY<BIGINT>", [1, None], "[1, null]"),
        ("ARRAY<ARRAY<INT>>", [[1], ["1234"]], None),
        ("ARRAY<DOUBLE>", [1.5, "1234"], None),
        ("ARRAY<FLOAT>", ["1234"], None),
        ("ARRAY<BOOLEAN>", [True, "t"], None),
        ("ARRAY<BINARY>", ["YWI=", 1234], None),
        ("ARRAY<BINARY>", ["YWI="], "[ab]"),
        ("ARRAY<DATE>", ["2026-02-01", "2026-02-01T22:00:00"], None),
    ],
)
def test_value_that_spark_reads_as_another_is_corrupt(
    messages: Any, kind: str, value: Any, read: str | None
) -> None:
    rows = messages([("db.t", event("c", after={"id": 1, "v": value}), 1)])
    changes, corrupt = debezium_changes(rows, f"id INT, v {kind}", keys=["id"])
    if read is None:
        assert changes.count() == 0
        (row,) = corrupt.collect()
        assert "not of the declared type" in row._reason
        return
    assert corrupt.count() == 0
    text = "hex(v)" if kind == "BINARY" else "CAST(v AS STRING)"
    (row,) = changes.selectExpr(f"{text} AS text").collect()
    assert row.text == read


@pytest.mark.parametrize(
    ("placeholder", "numbers"),
    [("az", [97, 122]), ("é", [-61, -87])],  # Java's bytes have a sign
)
def test_other_placeholder_named_by_type(
    messages: Any, placeholder: str, numbers: list[int]
) -> None:
    floats, texts = [float(number) for number in numbers], [str(number) for number in numbers]
    # Each column's type, the placeholder in it, and another value.
    columns: dict[str, tuple[str, Any, Any]] = {
        "s": ("ARRAY<SMALLINT>", numbers, numbers[:1]),
        "i": ("ARRAY<INT>", numbers, numbers[:1]),
        "b": ("ARRAY<BIGINT>", numbers, numbers[:1]),
        "f": ("ARRAY<FLOAT>", floats, floats[:1]),
        "d": ("ARRAY<DOUBLE>", floats, floats[:1]),
        "n": ("ARRAY<DECIMAL(12,2)>", texts, texts[:1]),
        "t": ("STRING", placeholder, f'a"{placeholder}"'),
        "w": ("DECIMAL(4,0)", placeholder, "1"),
    }
    schema = ", ".join(["id INT", *(f"{name} {kind}" for name, (kind, _, _) in columns.items())])
    rows = [{"id": at, **{name: of[at] for name, of in columns.items()}} for at in (1, 2)]
    # Debezium's JSON has no spaces.
    events = [("s", event("u", row).replace(" ", ""), row["id"]) for row in rows]

    changes, corrupt = debezium_changes(
        messages(events), schema, keys=["id"], unavailable_value=placeholder
    )

    unavailable, given = changes.collect()
    assert unavailable._unavailable == list(columns)
    assert [unavailable[name] for name in columns] == [None] * len(columns)
    assert given._unavailable == []
    assert [given[name] for name in columns] == [
        *(*[numbers[:1]] * 3, *[floats[:1]] * 2, [Decimal(numbers[0])]),
        *(f'a"{placeholder}"', Decimal(1)),
    ]
    assert corrupt.count() == 0


def test_envelope_with_schema_equals_plain_one(messages: Any) -> None:
    events = read_events("debezium-server-default") + read_events("types", "dbz.public.types")
    wrapped = [
        (subject, json.dumps({"schema": {"type": "struct"}, "payload": json.loads(data)}), sequence)
        for subject, data, sequence in events
    ]

    def rows(of: list[tuple[str, str, int]]) -> list[Row]:
        changes, corrupt = debezium_changes(messages(of), CUSTOMERS + ", big STRING", keys=["id"])
        assert corrupt.count() == 0
        return changes.collect()

    assert rows(wrapped) == rows(events)


def test_delete_has_key_only(messages: Any) -> None:
    events = [
        ("s", event("d", before={"a": 1, "b b": "x", "v.1": ""}), 7),
        ("s", event("d", before={"a": 2, "b b": "y", "v.1": "full"}), 8),
    ]
    changes, _ = debezium_changes(
        messages(events), "a INT, `b b` STRING, `v.1` STRING", keys=["a", "b b"]
    )

    assert [tuple(row) for row in changes.collect()] == [
        (1, "x", None, "d", 100, 7, []),
        (2, "y", None, "d", 100, 8, []),
    ]


def test_corrupt_messages_kept_aside_with_reason(messages: Any) -> None:
    types = "the payload is not a JSON object, or a row in it is not"
    corrupt_messages = {
        "{": types,
        "[]": types,
        "5": types,
        event("c", {"id": "one"}): "the value of 'id' is not of the declared type",
        event("c", {"id": 3, "n": 2**40}): "the value of 'n' is not of the declared type",
        event("c", "row"): types,
        "{}": "the event has no 'op'",
        '{"id": 1}': "the event has no 'op'",
        event("x", {"id": 1}): "unknown 'op': x",
        event("c", {"id": 1}, source={}): "the event has no source.lsn",
        event("c"): "the key column 'id' is null or absent in 'after'",
        event("u", {"n": 1}): "the key column 'id' is null or absent in 'after'",
        event("d", before={"id": None}): "the key column 'id' is null or absent in 'before'",
        event("d"): "the key column 'id' is null or absent in 'before'",
    }
    events = [("s", data, number) for number, data in enumerate(corrupt_messages, 1)]
    events += [
        ("s", event("c", {"id": 1, "n": 2}), 90),
        ("s", event("r", {"id": 2, "n": None}, source={}), 91),
    ]

    changes, corrupt = debezium_changes(messages(events), "id INT, n INT", keys=["id"])

    assert corrupt.columns == ["subject", "data", "sequence", "_reason"]
    rows = corrupt.orderBy("sequence").collect()
    assert {bytes(row.data).decode(): row._reason for row in rows} == corrupt_messages
    assert [tuple(row) for row in changes.collect()] == [
        (1, 2, "c", 100, 90, []),
        (2, None, "r", 0, 91, []),
    ]


SKIPPED = [
    None,
    "",
    event("t"),
    event("m", message={"prefix": "app", "content": "aGk="}),
    '{"ts_ms": 1795592779081}',
    '{"status": "BEGIN", "id": "7:1", "event_count": null, "ts_ms": 1795592779081}',
]


def test_truncate_ends_query(messages: Any) -> None:
    changes, _ = debezium_changes(
        messages(read_events("key-tombstone-msgid-tx")), CUSTOMERS, keys=["id"], truncate="fail"
    )

    with pytest.raises(
        PySparkException, match=r"TRUNCATE of subject dbz\.public\.customers, sequence 46: .*empty"
    ):
        changes.collect()


def test_kinds_of_messages_counted_in_progress(
    spark: SparkSession, messages: Any, tmp_path: Path
) -> None:
    events: list[tuple[str, str | None, int]] = [
        ("s", data, number) for number, data in enumerate(SKIPPED, 1)
    ]
    events += [("s", event("c", {"id": 1}), 10), ("s", "bad", 11), ("s", "worse", 12)]
    messages(events).write.parquet(str(tmp_path / "messages"))
    stream = spark.readStream.schema("subject STRING, data BINARY, sequence BIGINT").parquet(
        str(tmp_path / "messages")
    )

    changes, corrupt = debezium_changes(stream, "id INT", keys=["id"])
    batches: list[list[Row]] = []
    for part in (changes, corrupt):
        query = (
            part.writeStream.foreachBatch(lambda batch, _: batches.append(batch.collect()))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
        progress = query.lastProgress
        assert progress is not None
        counted = progress.observedMetrics["debezium_changes"].asDict()
        assert counted == {"changes": 1, "skipped": 5, "truncates": 1, "corrupt": 2}

    assert [len(batch) for batch in batches] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": ["ID"]}, r"keys has 'ID', expected a column of the schema \(id, name\)"),
        ({"keys": []}, "keys is .*expected a list"),
        ({"keys": "id"}, "keys is 'id', expected a list"),
        ({"truncate": "apply"}, "truncate is 'apply', expected 'skip' or 'fail'"),
        ({"schema": "INT"}, "schema is 'INT', expected columns"),
        ({"schema": "id INT, _lsn BIGINT"}, "schema has the column '_lsn'"),
        ({"drop": "sequence"}, "the DataFrame has no column 'sequence'"),
    ],
)
def test_invalid_argument_named(messages: Any, arguments: dict[str, Any], message: str) -> None:
    arguments = {"schema": "id INT, name STRING", "keys": ["id"], "drop": "", **arguments}
    frame = messages([("s", "{}", 1)]).drop(arguments.pop("drop"))

    with pytest.raises(ConfigurationError, match=message):
        debezium_changes(frame, **arguments)


RULES: dict[str, Any] = {
    "keys": ["id"],
    "sequence_by": ["_lsn", "_sequence"],
    "apply_as_deletes": "_operation = 'd'",
    "unavailable_columns": "_unavailable",
    "except_column_list": ["_operation"],
}


def changes_of(frame: DataFrame, schema: str) -> DataFrame:
    """The changes of messages none of which is corrupt."""
    changes, corrupt = debezium_changes(frame, schema, keys=["id"])
    assert corrupt.isEmpty()
    return changes


@pytest.mark.delta
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("debezium-server-default", ROWS),
        ("key-tombstone-msgid-tx", ROWS),
        # A row of the snapshot is older than a change with a smaller LSN.
        ("snapshot-edge", {1: ("late", *ROWS[1][1:]), 2: ROWS[2]}),
    ],
)
@spark_in_faults
def test_table_equals_rows_of_database(
    messages: Any, table: Path, merge: Merge, name: str, expected: dict[int, Any]
) -> None:
    events = read_events(name)
    # After a crash, the connector publishes events again, and the query reads some again.
    again = [(subject, data, sequence + 1000) for subject, data, sequence in events[10:30]]
    batches = [events[:20], events[15:], again]
    for batch in batches:
        merge(changes_of(messages(batch), CUSTOMERS), str(table), **RULES)

    rows = columns_of(table, "id", "name", "email", "phone")
    assert {row[0]: row[1:] for row in rows} == expected


@pytest.mark.delta
def test_table_keeps_unavailable_values(messages: Any, table: Path, merge: Merge) -> None:
    created, updated = read_events("types", "dbz.public.types")
    value = json.loads(created[1])["after"]["big"]
    again = updated[1].replace('"f":1.5', '"f":2.5').replace('"lsn":39085296', '"lsn":39085297')
    other = created[1].replace('"id":1,', '"id":2,').replace('"lsn":39084816', '"lsn":39084817')

    for batch in (
        [created, (created[0], other, 4)],
        [updated],
        [(updated[0], again, 6), (updated[0], other, 5)],
    ):
        changes = changes_of(messages(batch), "id INT, f DOUBLE, big STRING")
        merge(changes, str(table), **RULES)

    assert columns_of(table, "id", "f", "big") == [(1, 2.5, value), (2, 0.5, value)]
