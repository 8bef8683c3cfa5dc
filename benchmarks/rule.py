"""The rule of change data alone: events against the rows of their keys, without Spark and tables.

``python -m benchmarks.rule [--rows 5000] [--rounds 50]``

A batch has one event for each key, every twentieth of them a delete, and a tenth of the keys have
no row. The readers return rows that are in memory, so that the time is that of the rule. The
figures are milliseconds of the fastest and of the median round. The goal for 5,000 entries is 2 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.support.delta_merge import rows as entries_of
from nats_stream_source.delta.rules.changes import changes_of
from nats_stream_source.delta.rules.layout import (
    DELETE,
    DELETED_COLUMN,
    END,
    SEQUENCE,
    START,
    TIME,
    Deletes,
    Layout,
)
from nats_stream_source.delta.rules.reading import Integers, RowChanges

_TRACKED = ("value",)
_ORDER = ("stream_created", "revision")

Rule = Callable[[], RowChanges]


def entries(count: int, deletes: Deletes = "remove") -> Rule:
    """Entries of a bucket and one row for each key."""
    events, rows = _batch(count), _rows(count)
    if deletes == "mark":
        rows = rows.append_column(DELETED_COLUMN, pa.array([False] * len(rows)))
    return _rule(events, Layout.of_entries(rows.column_names, deletes), rows, None)


def events(count: int) -> Rule:
    """Events with a sequence of their own, a row and a recorded delete for each key."""
    batch, rows = _batch(count), _rows(count)
    batch = batch.append_column(SEQUENCE, batch["revision"])
    rows = rows.append_column(SEQUENCE, rows["revision"])
    layout = Layout(1, ("bucket", "key"), "bigint", (SEQUENCE,), "remove", times=False)
    older = pa.array(np.zeros(len(rows), np.int64))
    at = rows.column_names.index(SEQUENCE)
    return _rule(batch, layout, rows, rows.set_column(at, SEQUENCE, older))


def history(count: int) -> Rule:
    """Entries of a bucket and one open version for each key."""
    batch, rows = _batch(count), _rows(count)
    batch = batch.append_column(SEQUENCE, _sequence(batch)).append_column(TIME, batch["created"])
    start = _sequence(rows)
    state = rows.append_column(SEQUENCE, start)
    state = state.append_column(DELETE, pa.array([False] * len(rows)))
    state = state.append_column(TIME, rows["created"])
    rows = rows.append_column(START, start).append_column(END, pa.nulls(len(rows), start.type))
    rows = rows.append_column("valid_from", rows["created"])
    rows = rows.append_column("valid_to", pa.nulls(len(rows), rows["created"].type))
    sequence = "struct<stream_created:timestamp,revision:bigint>"
    layout = Layout(2, ("bucket", "key"), sequence, (SEQUENCE,), "remove", times=True)
    return _rule(batch, layout, rows, state[:0])


CASES: dict[str, Callable[[int], Rule]] = {
    "entries": entries,
    "entries, marked deletes": lambda count: entries(count, "mark"),
    "events with a state table": events,
    "history of entries": history,
}


def _batch(count: int) -> pa.Table:
    """One event for each key, in no order of the keys."""
    numbers = np.random.default_rng(1).permutation(count)
    batch = entries_of(numbers, 10 * count)
    deletes = np.arange(count) % 20 == 19
    at = batch.column_names.index("operation")
    operations = pa.array(np.where(deletes, "DEL", "PUT"))
    return batch.set_column(at, "operation", operations).append_column(DELETE, pa.array(deletes))


def _rows(count: int) -> pa.Table:
    """The rows of nine tenths of the keys."""
    return entries_of(np.arange(count - count // 10), 1)


def _sequence(table: pa.Table) -> pa.Array:
    parts = [table[name].combine_chunks() for name in _ORDER]
    return pa.StructArray.from_arrays(parts, list(_ORDER))


class _Rows:
    """A reader of rows in memory, whose slots are the positions."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows
        self._keys = rows["key"].combine_chunks()

    def find(self, keys: pa.Table) -> Integers:
        at = pc.fill_null(pc.index_in(keys["key"], self._keys), -1)
        return np.asarray(at.to_numpy(), np.int64)

    def of_keys(self, keys: pa.Table) -> Integers:
        slots = self.find(keys)
        return np.asarray(slots[slots >= 0])

    def read(self, slots: Integers, columns: Sequence[str]) -> pa.Table:
        return self._rows.select(list(columns)).take(pa.array(slots, mask=slots < 0))


def _rule(events: pa.Table, layout: Layout, rows: pa.Table, state: pa.Table | None) -> Rule:
    tracked = _TRACKED if layout.scd_type == 2 else None
    readers = _Rows(rows), None if state is None else _Rows(state)
    return lambda: changes_of(events, layout, tracked, *readers)


def measure(rule: Rule, rounds: int) -> tuple[float, float]:
    """Milliseconds of the fastest and of the median round."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        changes = rule()
        taken.append(1000 * (time.perf_counter() - began))
    assert len(changes)
    return min(taken), statistics.median(taken)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args(arguments)
    for name, case in CASES.items():
        fastest, median = measure(case(given.rows), given.rounds)
        print(f"{name:<28}{fastest:8.2f} ms{median:8.2f} ms")


if __name__ == "__main__":
    main()
