"""Reduce Arrow batches of events to those that decide: the newest of each key.

**Order.** Of two events of a key, the newer one has the greater sequence, compared part by part.
Each event with a null in its key or sequence is kept, and is then reported as invalid. The
reduction is associative, so it can run on each partition of a batch and again on the results.

**Cost.** :class:`DecidingEvents` keeps the events in Arrow buffers and reduces them whenever they
have doubled since the last reduction. Its memory is bounded by about twice the reduced events plus
one batch, and its time is linear in the rows if their order is that of the stream. Rows in another
order are sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.rules.layout import UNAVAILABLE, Layout

# Less than this is not worth a reduction.
_FIRST_ROWS = 65_536
_FIRST_BYTES = 64 << 20
_Column = TypeVar("_Column", pa.Array, pa.ChunkedArray)
_GREATEST = np.iinfo(np.int64).max


class DecidingEvents:
    """Collects batches of events, and returns those that decide.

    With SCD type 1 these are the newest of each key, with all that have its sequence unless they
    are entries, and those that take values from the events before them. With type 2 all decide.

    Args:
        schema: of the batches.
        layout: the layout of the table.
    """

    def __init__(self, schema: pa.Schema, layout: Layout) -> None:
        self.schema = schema
        self._layout = layout
        self._batches: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        self._next_rows, self._next_bytes = _FIRST_ROWS, _FIRST_BYTES

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch."""
        self._batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows > self._next_rows or self._bytes > self._next_bytes:
            self._reduce()
            self._next_rows = max(_FIRST_ROWS, 2 * self._rows)
            self._next_bytes = max(_FIRST_BYTES, 2 * self._bytes)

    def table(self) -> pa.Table:
        """The events that decide, in no particular order."""
        self._reduce()
        return self._concatenated()

    def _reduce(self) -> None:
        if self._layout.scd_type == 2:
            return
        layout, events = self._layout, self._concatenated()
        kept = events[:0]
        if UNAVAILABLE in events.column_names:
            lengths = pc.fill_null(pc.list_value_length(events[UNAVAILABLE]), 0)
            kept = events.filter(pc.greater(lengths, 0))
            events = events.filter(pc.equal(lengths, 0))
        newest = newest_per_key(events, layout.keys, layout.order, ties=not layout.entries)
        reduced = pa.concat_tables([newest, kept])
        self._batches = reduced.to_batches()
        self._rows, self._bytes = reduced.num_rows, reduced.nbytes

    def _concatenated(self) -> pa.Table:
        return pa.Table.from_batches(self._batches, self.schema)


def newest_per_key(
    entries: pa.Table,
    keys: Sequence[str],
    order: Sequence[str],
    *,
    ties: bool = False,
) -> pa.Table:
    """The newest entry of each key, and all that are invalid, with all columns of ``entries``.

    Args:
        entries: in any order. An entry with a null in a key or in its order is invalid.
        keys: columns that identify the key.
        order: columns that order the entries of a key, compared one by one.
        ties: whether all entries of a key that have its greatest order are returned; else one.
    """
    if entries.num_rows == 0:
        return entries
    codes = key_codes(entries, keys)
    if int(codes.max()) + 1 == len(codes):  # one entry of each key
        return entries
    parts = sequence_values(entries, order)
    position = np.arange(len(codes))
    in_position = codes
    if greater([part[:-1] for part in parts], [part[1:] for part in parts]).any():
        position = np.lexsort(parts[::-1])
        in_position = codes[position]
    # For a repeated index, the assignment keeps the last value: the newest entry.
    last = np.full(int(codes.max()) + 1, -1)
    last[in_position] = position
    newest = np.zeros(len(codes), bool)
    newest[last[last >= 0]] = True
    if ties:
        newest = np.all([part == part[last[codes]] for part in parts], axis=0)
    newest |= has_null(entries, [*keys, *order])
    # A filter copies chunk by chunk; `take` would concatenate the chunks, at most 2 GiB of values.
    return entries.filter(pa.array(newest))


def key_codes(entries: pa.Table, keys: Sequence[str]) -> np.ndarray:
    """A number for each entry, equal for equal keys, from 0 to less than the number of entries."""
    codes: np.ndarray | None = None
    for column in keys:
        values = without_negative_zero(entries[column]).combine_chunks()
        encoded = values.dictionary_encode(null_encoding="encode")
        column_codes = encoded.indices.to_numpy().astype(np.int64)
        if codes is None or not codes.any():
            codes = column_codes
        else:
            # Dense again, so that the product of the columns' sizes does not size an array.
            pairs = codes * len(encoded.dictionary) + column_codes
            codes = np.unique(pairs, return_inverse=True)[1]
    assert codes is not None
    return codes


def without_negative_zero(column: _Column) -> _Column:
    """The values with 0.0 in place of -0.0, which equals it and has other bytes."""
    if not pa.types.is_floating(column.type):
        return column
    return pc.add(column, pa.scalar(0.0, column.type))


def order_values_nulls_last(column: pa.ChunkedArray) -> np.ndarray:
    """A number for each value, in the order of the values; a null has the greatest."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_timestamp(kind):
        values = pc.cast(column, pa.int64())
    else:
        encoded = without_negative_zero(column).combine_chunks().dictionary_encode()
        ranks = np.empty(len(encoded.dictionary), np.int64)
        ranks[pc.array_sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(ranks))
        values = pa.array(ranks, pa.int64()).take(encoded.indices)
    numbers: np.ndarray = pc.fill_null(values, int(_GREATEST)).to_numpy(zero_copy_only=False)
    return numbers


def sequence_values(entries: pa.Table, order: Sequence[str]) -> list[np.ndarray]:
    """:func:`order_values_nulls_last` of each part of the sequence, with the fields of structs."""
    return [order_values_nulls_last(column) for column in sequence_parts(entries, order).columns]


def greater(sequences: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    """Whether each sequence is greater than the other one; their parts are compared one by one.

    Args:
        sequences: their parts, as :func:`sequence_values` returns them.
        others: the parts of as many others.
    """
    found, equal = np.zeros(len(sequences[0]), bool), np.ones(len(sequences[0]), bool)
    for part, other in zip(sequences, others, strict=True):
        found |= equal & (part > other)
        equal &= part == other
    return found


def sequence_parts(entries: pa.Table, order: Sequence[str]) -> pa.Table:
    """The parts of the sequence, with the fields of structs as columns."""
    parts = entries.select(list(order))
    while any(pa.types.is_struct(field.type) for field in parts.schema):
        parts = parts.flatten()
    return parts


def has_null(entries: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Whether each entry has a null in one of these columns or in a field of theirs."""
    nulls = np.zeros(len(entries), bool)
    for column in sequence_parts(entries, columns).columns:
        nulls |= pc.is_null(column).to_numpy()
    return nulls
