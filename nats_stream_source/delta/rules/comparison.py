"""Comparison of rows in Arrow: null-safe equality, and the rule for events with equal sequences.

**Equal sequences.** Two events of a key with one sequence and the same values are one event, read
twice. With other values they contradict each other, and one of them counts, whatever their order
and batches: a delete before an upsert, and of upserts the one with the greatest values, compared
column by column in the order of the table. A null is the least value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.delta.rules.layout import DELETE
from nats_stream_source.delta.rules.newest import greater, has_null, sequence_values
from nats_stream_source.delta.rules.reading import Integers

Booleans = NDArray[np.bool_]


def compared(ones: pa.Table, others: pa.Table, order: Sequence[str]) -> tuple[Booleans, Booleans]:
    """Whether each row is newer than the other one, and whether it has the same sequence.

    A row with a null in its sequence, and a row that is missing, are older than each other row.

    Args:
        ones: rows whose sequences have values.
        others: as many rows.
        order: the columns of the sequence.
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
