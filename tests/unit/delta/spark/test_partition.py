"""The rule in a partition of Spark: in runs of whole keys, with the changes of a single run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.layout import DELETE, Layout
from nats_stream_source.delta.spark import partition
from nats_stream_source.delta.spark.partition import (
    A_ROW,
    A_STATE,
    AN_EVENT,
    CONTRADICTIONS,
    COUNT,
    EVENT,
    KIND,
    READ,
    REMOVED,
    ROW,
    STATE,
    STATE_READ,
    partition_work,
)

_ROW = pa.schema([("id", pa.float64()), ("n", pa.int64()), ("v", pa.string())])
_EVENT = _ROW.append(pa.field(DELETE, pa.bool_()))
_STATE = _ROW.remove(2)
_LAYOUT = Layout(1, ("id",), "bigint", ("n",), "remove", False)
_SHAPE = EventShape(_EVENT, _LAYOUT, target=_EVENT)
_OUTPUT = pa.schema(
    [
        (KIND, pa.int32()),
        (COUNT, pa.int64()),
        (A_ROW, pa.struct(list(_ROW))),
        (A_STATE, pa.struct(list(_STATE))),
        (READ, pa.struct(list(_ROW))),
        (STATE_READ, pa.struct(list(_STATE))),
    ]
)
_INPUT = pa.schema(
    [
        ("k", pa.float64()),
        (KIND, pa.int32()),
        (AN_EVENT, pa.struct(list(_EVENT))),
        (A_ROW, pa.struct(list(_ROW))),
        (A_STATE, pa.struct(list(_STATE))),
    ]
)
_Row = tuple[float, int, dict[str, Any]]


def _batches(rows: list[_Row], size: int) -> Iterator[pa.RecordBatch]:
    """The rows of a partition, sorted by key, in batches of this size."""
    names = {EVENT: AN_EVENT, ROW: A_ROW, STATE: A_STATE}
    for start in range(0, len(rows), size):
        values = [
            {"k": id + 0.0, KIND: kind, names[kind]: {"id": id, **row}}
            for id, kind, row in rows[start : start + size]
        ]
        yield pa.RecordBatch.from_pylist(values, _INPUT)


def _changes(rows: list[_Row], size: int) -> list[dict[str, Any]]:
    work = partition_work(_SHAPE, "t", ["k"], _OUTPUT)
    changed = [row for batch in work(_batches(rows, size)) for row in batch.to_pylist()]
    return sorted(changed, key=lambda row: repr(row))


def _partition(keys: int) -> list[_Row]:
    rows: list[_Row] = []
    for id in map(float, range(keys)):
        rows += [
            (id, EVENT, {"n": 5, "v": "new", DELETE: id % 3 == 0}),
            (-0.0 if id == 0 else id, EVENT, {"n": 4, "v": "old", DELETE: False}),
            (id, ROW, {"n": 3 if id % 2 else 9, "v": "table"}),
        ]
        if id % 5 == 0:
            rows.append((id, STATE, {"n": 7}))
    return rows


@pytest.mark.parametrize("size", [2, 7])
@pytest.mark.parametrize("run_bytes", [1, 1_000])
def test_changes_of_runs_are_those_of_one_run(
    monkeypatch: pytest.MonkeyPatch, size: int, run_bytes: int
) -> None:
    rows = _partition(20)
    expected = _changes(rows, 1000)
    assert {row[KIND] for row in expected} == {ROW, REMOVED, STATE}
    monkeypatch.setattr(partition, "RUN_BYTES", run_bytes)
    assert _changes(rows, size) == expected


def test_run_is_bounded_and_has_whole_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "RUN_BYTES", 2_000)
    rows = _partition(200)
    runs = list(partition._runs(_batches(rows, 10), ["k"]))
    assert sum(map(len, runs)) == len(rows)
    seen: set[float] = set()
    for run in runs:
        keys = {abs(key) for key in run["k"].to_pylist()}
        assert not keys & seen
        seen |= keys
    assert len(runs) > 10
    assert max(run.nbytes for run in runs) < 4_000


def test_changes_have_row_as_read() -> None:
    rows: list[_Row] = [
        (1.0, EVENT, {"n": 5, "v": "new", DELETE: False}),
        (1.0, ROW, {"n": 3, "v": "table"}),
        (2.0, EVENT, {"n": 5, "v": "new", DELETE: False}),
        (3.0, EVENT, {"n": 5, "v": None, DELETE: True}),
        (3.0, ROW, {"n": 3, "v": "gone"}),
        (4.0, EVENT, {"n": 5, "v": "a", DELETE: False}),
        (4.0, EVENT, {"n": 5, "v": "b", DELETE: False}),
    ]
    found = {(row[KIND], (row[A_ROW] or {}).get("id")): row for row in _changes(rows, 1000)}
    assert found[ROW, 1.0][A_ROW] == {"id": 1.0, "n": 5, "v": "new"}
    assert found[ROW, 1.0][READ] == {"id": 1.0, "n": 3, "v": "table"}
    assert found[ROW, 2.0][READ] == {"id": None, "n": None, "v": None}
    assert found[REMOVED, 3.0][READ] == {"id": 3.0, "n": 3, "v": "gone"}
    assert found[STATE, None][A_STATE] == {"id": 3.0, "n": 5}
    assert found[STATE, None][STATE_READ] == {"id": None, "n": None}
    assert found[ROW, 4.0][A_ROW]["v"] == "b"
    assert found[CONTRADICTIONS, None][COUNT] == 1
