"""Rows for the rule: how an executor reads them, which changes it gets back, order and equality.

**Order.** Of two events of a key, the newer one has the greater sequence, compared part by part.
Each event with a null in its key or sequence is kept, and is then reported as invalid. The
reduction is associative, so it can run on each partition of a batch and again on the results.

**Cost.** :class:`DecidingEvents` keeps the events in Arrow buffers and reduces them whenever they
have doubled since the last reduction. Its memory is bounded by about twice the reduced events plus
one batch, and its time is linear in the rows if their order is that of the stream. Rows in another
order are sorted.

**Equal sequences.** Two events of a key with one sequence and the same values are one event, read
twice. With other values they contradict each other, and one of them counts, whatever their order
and batches: a delete before an upsert, and of upserts the one with the greatest values, compared
column by column in the order of the table. A null is the least value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.delta.rules.layout import DELETE, UNAVAILABLE, Layout

Integers = NDArray[np.int64]
Where = Mapping[str, tuple[object, ...]]
"""Rows whose column has one of these values, by column; None is null."""


class Reader(Protocol):
    """Reads the rows of one version of a table.

    A row has a *slot*, a number from 0 that names it in this version.
    """

    def find(self, keys: pa.Table) -> Integers:
        """The slot of the row of each key, -1 for none; for a table with one row per key.

        Args:
            keys: the key columns, none of them null, with a key at most once.
        """

    def of_keys(self, keys: pa.Table) -> Integers:
        """The slots of all rows of keys, in no particular order.

        Args:
            keys: the key columns, with a key at most once. If they have a column ``__SEQUENCE``,
                rows of a key may be left out that end before this sequence, or are before the last
                one that begins before it: an event at the end of a row can go on with this row.
        """

    def read(self, slots: Integers, columns: Sequence[str]) -> pa.Table:
        """Columns of the rows of slots, with the table's types; nulls for the slot -1."""


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Changes of a table and of its state table.

    Attributes:
        upserts: rows of the table; a column of the table that they lack keeps its value.
        replaced: the slot of the row that each upsert replaces, -1 for a new row.
        removed: the slots of rows that are removed and not written again.
        state: the changes of the state table; None if the layout does not have one.
        contradictions: how many sequences had events with different values.
    """

    upserts: pa.Table
    replaced: Integers
    removed: Integers
    state: RowChanges | None = None
    contradictions: int = 0

    def __len__(self) -> int:
        """The number of rows of the table that change."""
        return len(self.upserts) + len(self.removed)

    @property
    def state_only(self) -> bool:
        """Whether only the state table changes.

        The table then gets a commit without changes. A writer that has read the state before would
        not learn of the event otherwise: it only compares the versions of the table.
        """
        return bool(self.state) and not len(self)


Booleans = NDArray[np.bool_]

# Less than this is not worth a reduction.
_FIRST_ROWS = 65_536
_FIRST_BYTES = 64 << 20
_Column = TypeVar("_Column", pa.Array, pa.ChunkedArray)
_GREATEST = np.iinfo(np.int64).max


class DecidingEvents:
    """Collects batches of events, and returns those that decide.

    With SCD type 1 these are the newest of each key, with all that have its sequence unless they
    are entries, and those that take values from the events before them. With type 2 all decide.
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
    entries: pa.Table, keys: Sequence[str], order: Sequence[str], *, ties: bool = False
) -> pa.Table:
    """The newest entry of each key, and all that are invalid, with all columns of ``entries``.

    Args:
        entries: in any order. An entry with a null in a key or in its order is invalid.
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


# -- equality ------------------------------------------------------------------------------------


def compared(ones: pa.Table, others: pa.Table, order: Sequence[str]) -> tuple[Booleans, Booleans]:
    """Whether each row is newer than the other one, and whether it has the same sequence.

    A row with a null in its sequence, and a row that is missing, are older than each other row.

    Args:
        ones: rows whose sequences have values.
    """
    columns = list(order)
    both = pa.concat_tables(
        [ones.select(columns).cast(others.select(columns).schema), others.select(columns)]
    )
    parts, count = sequence_values(both, columns), len(ones)
    missing = has_null(others, columns)
    equal = np.all([part[:count] == part[count:] for part in parts], axis=0)
    later = greater([part[:count] for part in parts], [part[count:] for part in parts])
    return missing | later, ~missing & equal


def same_rows(one: pa.Table, other: pa.Table, columns: Sequence[str]) -> Booleans:
    """Whether each row of a table has the values of the same row of another one."""
    same = np.ones(len(one), bool)
    for name in columns:
        same &= same_values(one[name], other[name])
    return same


def same_values(one: pa.ChunkedArray, other: pa.ChunkedArray) -> Booleans:
    """Whether each value equals the other one; two nulls are equal, and so are two NaN."""
    kind = one.type
    if pa.types.is_struct(kind):
        same = np.asarray(pc.equal(pc.is_null(one), pc.is_null(other)).to_numpy(), bool)
        for field, other_field in zip(one.flatten(), other.flatten(), strict=True):
            same &= same_values(field, other_field)
        return same
    if pa.types.is_nested(kind):
        pairs = zip(one.to_pylist(), other.to_pylist(), strict=True)
        return np.fromiter((repr(a) == repr(b) for a, b in pairs), bool, len(one))
    if other.type != kind:
        other = other.cast(kind)
    equal = pc.fill_null(pc.equal(one, other), False)
    equal = pc.or_(equal, pc.and_(pc.is_null(one), pc.is_null(other)))
    if pa.types.is_floating(kind):
        both = pc.and_(pc.is_nan(one), pc.is_nan(other))
        equal = pc.or_(equal, pc.fill_null(both, False))
    return np.asarray(equal.to_numpy(), bool)


def one_per_sequence(
    events: pa.Table, groups: Integers, columns: Sequence[str]
) -> tuple[Integers, Integers]:
    """The positions of the events that count, one of each group, and the contradicted groups.

    Args:
        events: in ascending order of their groups.
        groups: the number of each event's key and sequence, dense and from 0.
        columns: the values that are compared.
    """
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    again = np.flatnonzero(np.diff(groups, prepend=-1) == 0)
    if not len(again):
        return first, again
    one, other = events.take(pa.array(again - 1)), events.take(pa.array(again))
    deletes, others = (np.asarray(part[DELETE].to_numpy(), bool) for part in (one, other))
    same = (deletes & others) | (~deletes & ~others & same_rows(one, other, columns))
    contradicted = np.unique(groups[again[~same]])
    for group in contradicted:
        members = np.flatnonzero(groups == group)
        first[group] = members[winner(events.take(pa.array(members)), columns)]
    return first, contradicted


def dense_groups(parts: Sequence[Integers]) -> Integers:
    """A number for each row, in the order of the parts one by one; dense and from 0."""
    groups = np.zeros(len(parts[0]), np.int64)
    for part in parts:
        numbers = np.unique(part, return_inverse=True)[1]
        groups = groups * (int(numbers.max(initial=0)) + 1) + numbers
        groups = np.unique(groups, return_inverse=True)[1]
    return groups


def positions_in(rows: pa.Table, others: pa.Table, columns: Sequence[str]) -> Integers:
    """For each row, the position of the other row with equal columns; -1 for none."""
    keys = pa.concat_tables(
        [rows.select(list(columns)), others.select(list(columns)).cast(rows.select(columns).schema)]
    )
    groups = dense_groups(sequence_values(keys, columns))
    at = np.full(len(keys) + 1, -1)
    at[groups[len(rows) :]] = np.arange(len(others))
    return at[groups[: len(rows)]]


def winner(events: pa.Table, columns: Sequence[str]) -> int:
    """The position of the event that counts of some with one key and sequence; see the module."""
    rows = events.select([DELETE, *columns]).to_pylist()
    return max(range(len(rows)), key=lambda at: _rank(rows[at], columns))


def _rank(row: dict[str, Any], columns: Sequence[str]) -> tuple[Any, ...]:
    if row[DELETE]:
        return (True,)
    return (False, *(_value_rank(row[name]) for name in columns))


def _value_rank(value: Any) -> tuple[Any, ...]:
    if value is None:
        return (False,)
    if value != value:  # NaN
        return (True, float("inf"))
    return (True, repr(value) if isinstance(value, (list, dict)) else value)
