"""The rule in a partition of Spark: changes of the keys that are in it, in runs of bounded size.

A partition has the events of its keys, the rows of the table and those of the state, sorted by key.
:func:`partition_work` takes whole keys from it until a run has :data:`RUN_BYTES`, and yields the
changes of the run, so the memory of an executor does not grow with the partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from nats_stream_source.delta.rules.changes import changes_of
from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.order import key_codes, positions_in
from nats_stream_source.delta.rules.reading import Integers
from nats_stream_source.delta.schema import OWN_PREFIX

RUN_BYTES = 64 << 20
"""A run of keys ends with the first key after this many bytes of Arrow."""

# What a row that goes to a partition, or comes from it, is.
KIND, COUNT = OWN_PREFIX + "kind", OWN_PREFIX + "count"
EVENT, ROW, STATE, REMOVED, CONTRADICTIONS = range(5)
AN_EVENT, A_ROW, A_STATE = (OWN_PREFIX + name for name in ("event", "row", "state"))
READ, STATE_READ = OWN_PREFIX + "read", OWN_PREFIX + "state_read"

_Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def partition_work(shape: EventShape, table: str, keys: Sequence[str], output: pa.Schema) -> _Work:
    """The function for ``mapInArrow``.

    Args:
        shape: of the events.
        table: path or name, for errors.
        keys: the columns by which the partition is sorted.
        output: of the function.
    """
    layout = shape.layout

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for run in _runs(batches, keys):
            kinds = run[KIND].to_numpy()

            def of(kind: int, name: str, run: pa.Table = run, kinds: Integers = kinds) -> pa.Table:
                struct = run.filter(pa.array(kinds == kind))[name]
                return pa.table(struct.flatten(), names=[field.name for field in struct.type])

            rows = _RowsOfRun(of(ROW, A_ROW), layout.keys)
            state = None
            if A_STATE in run.column_names:
                state = _RowsOfRun(of(STATE, A_STATE), layout.keys)
            events = shape.events(of(EVENT, AN_EVENT), table)
            if not len(events):
                continue
            changes = changes_of(events, layout, shape.tracked, rows, state)
            read = rows.read(changes.replaced)
            yield from _packed(ROW, {A_ROW: changes.upserts, READ: read}, output)
            gone = rows.read(changes.removed)
            yield from _packed(REMOVED, {A_ROW: gone, READ: gone}, output)
            if state is not None:
                identity = layout.state("state").identity
                known = state.read(positions_in(changes.state, state.rows, identity))
                yield from _packed(STATE, {A_STATE: changes.state, STATE_READ: known}, output)
            if changes.contradictions:
                count = pa.table({COUNT: pa.array([changes.contradictions], pa.int64())})
                yield from _packed(CONTRADICTIONS, {"": count}, output)

    return work


@dataclass(frozen=True, slots=True)
class _RowsOfRun:
    """A :class:`nats_stream_source.delta.rules.reading.Reader` of rows in memory."""

    rows: pa.Table
    keys: tuple[str, ...]

    def find(self, keys: pa.Table) -> Integers:
        return positions_in(keys, self.rows, self.keys)

    def of_keys(self, keys: pa.Table) -> Integers:
        return np.flatnonzero(positions_in(self.rows, keys, self.keys) >= 0)

    def read(self, slots: Integers, columns: Sequence[str] | None = None) -> pa.Table:
        rows = self.rows if columns is None else self.rows.select(list(columns))
        return rows.take(pa.array(np.maximum(slots, 0), mask=slots < 0))


def _runs(batches: Iterator[pa.RecordBatch], keys: Sequence[str]) -> Iterator[pa.Table]:
    """The rows of a partition in tables of whole keys."""
    kept: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        kept.append(batch)
        size += batch.nbytes
        if size < RUN_BYTES:
            continue
        run = pa.Table.from_batches(kept)
        codes = key_codes(run.select(list(keys)), keys)
        whole = np.flatnonzero(codes != codes[-1])
        if len(whole):  # the last key can go on
            end = int(whole[-1]) + 1
            yield run[:end]
            run = run[end:]
        kept = run.to_batches()
        size = run.nbytes if len(whole) else 0
    if kept:
        yield pa.Table.from_batches(kept)


def _packed(kind: int, structs: dict[str, pa.Table], output: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows of the output with these structs and null in the others."""
    count = len(next(iter(structs.values())))
    if not count:
        return
    columns = []
    for field in output:
        table = structs.get(field.name)
        if field.name == KIND:
            columns.append(pa.array(np.full(count, kind, np.int32)))
        elif field.name == COUNT:
            columns.append(structs[""][COUNT] if "" in structs else pa.nulls(count, field.type))
        elif table is None:
            columns.append(pa.nulls(count, field.type))
        else:
            arrays = [
                table[inner.name].cast(inner.type).combine_chunks()
                if inner.name in table.column_names
                else pa.nulls(count, inner.type)
                for inner in field.type
            ]
            columns.append(pa.StructArray.from_arrays(arrays, fields=list(field.type)))
    yield from pa.table(columns, schema=output).to_batches()
