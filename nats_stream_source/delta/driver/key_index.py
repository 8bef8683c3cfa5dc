"""An exact index of keys: each has a *slot*, a number that it keeps.

Keys are in runs: the keys of a range of slots, and their 64-bit hashes in ascending order. A key is
found by its hash in each run, and then compared byte by byte: two keys with one hash are two keys.
New keys are a run of their own. Two runs are merged when the earlier one is not at least four times
as large, so that a key moves few times and a search looks into few runs.

Memory: 20 bytes for each key plus its bytes. Pure: arrays in, arrays out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.delta.rules.rows import Integers, without_negative_zero

_RATIO = 4  # of the sizes of two runs
_HASHED_AT_ONCE = 1 << 18  # keys; bounds the memory of a hash
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def encoded_keys(columns: list[pa.Array]) -> pa.LargeBinaryArray:
    """The values of the key columns as one binary value for each row, null if one of them is null.

    Different keys have different values: in several columns, a zero byte is written as ``00 01``,
    and ``00 00`` separates columns.
    """
    values = [_binary(column) for column in columns]
    if len(values) == 1:
        return values[0]
    escaped = [
        pc.replace_substring(value, b"\x00", b"\x00\x01") if _has_zero_byte(value) else value
        for value in values
    ]
    return pc.binary_join_element_wise(*escaped, pa.scalar(b"\x00\x00", pa.large_binary()))


def _binary(column: pa.Array) -> pa.LargeBinaryArray:
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return column.cast(pa.large_binary())
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.int64())
    column = without_negative_zero(column)
    return column.cast(pa.large_string()).cast(pa.large_binary())


def _has_zero_byte(values: pa.LargeBinaryArray) -> bool:
    data = values.buffers()[2]
    return data is not None and not np.frombuffer(data, np.uint8).all()


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys with their hashes, and the order of these, which searches are fast in.

    Attributes:
        values: the keys as :func:`encoded_keys` returns them, none of them null.
        hashes: the 64-bit hash of each.
        order: the positions in ascending order of the hashes.
    """

    values: pa.LargeBinaryArray
    hashes: NDArray[np.uint64]
    order: Integers

    @staticmethod
    def of(values: pa.LargeBinaryArray) -> Keys:
        """The keys of these values."""
        hashes = _hashes(values)
        return Keys(values, hashes, np.argsort(hashes, kind="stable"))

    def __len__(self) -> int:
        return len(self.values)

    def take(self, which: Integers) -> Keys:
        """A copy of the keys at these positions, which does not hold the batch in memory."""
        values = self.values.take(pa.array(which))
        if len(which) == len(self) and (which == np.arange(len(self))).all():
            return Keys(values, self.hashes, self.order)
        hashes = self.hashes[which]
        return Keys(values, hashes, np.argsort(hashes, kind="stable"))

    def first_repeated(self) -> int | None:
        """The position of a key that occurs twice; None if all keys differ."""
        hashes = self.hashes[self.order]
        same = np.flatnonzero(hashes[1:] == hashes[:-1])
        if not len(same):
            return None
        which = self.order[np.unique(np.concatenate([same, same + 1]))]
        encoded = self.values.take(pa.array(which)).dictionary_encode().indices.to_numpy()
        _, first, counts = np.unique(encoded, return_index=True, return_counts=True)
        repeated = first[counts > 1]
        return int(which[repeated[0]]) if len(repeated) else None


@dataclass(frozen=True, slots=True)
class _Run:
    """The keys of a range of slots."""

    first: int  # slot
    keys: pa.LargeBinaryArray  # in the order of slots
    hashes: NDArray[np.uint64]  # in ascending order
    slots: NDArray[np.uint32]  # of each hash, counted from the first one

    def __len__(self) -> int:
        return len(self.slots)


class KeyIndex:
    """Slots by key; see the module."""

    def __init__(self) -> None:
        self._count = 0
        self._runs: list[_Run] = []  # in the order of slots, the largest first

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """The memory of the index in bytes."""
        return sum(one.hashes.nbytes + one.slots.nbytes + one.keys.nbytes for one in self._runs)

    def find(self, keys: Keys) -> Integers:
        """The slot of each key, -1 for a key without one."""
        found = np.full(len(keys), -1, np.int64)
        if not self._count:
            return found
        hashes, open_ = keys.hashes, keys.order
        for run in self._runs:
            at = np.searchsorted(run.hashes, hashes[open_])
            left = open_
            while True:
                inside = at < len(run.hashes)
                left, at = left[inside], at[inside]
                same_hash = run.hashes[at] == hashes[left]
                left, at = left[same_hash], at[same_hash]
                if not len(left):
                    break
                slots = run.slots[at].astype(np.int64)
                pair = keys.values.take(pa.array(left)), run.keys.take(pa.array(slots))
                equal = pc.equal(*pair).to_numpy(zero_copy_only=False)
                found[left[equal]] = run.first + slots[equal]
                left, at = left[~equal], at[~equal] + 1  # another key with this hash comes next
            open_ = open_[found[open_] < 0]
            if not len(open_):
                break
        return found

    def insert(self, keys: Keys) -> Integers:
        """The new slots of keys that do not have one, each of them different."""
        count = len(keys)
        first, self._count = self._count, self._count + count
        if count:
            order = keys.order
            self._runs.append(_Run(first, keys.values, keys.hashes[order], order.astype(np.uint32)))
        while len(self._runs) > 1 and len(self._runs[-2]) < _RATIO * len(self._runs[-1]):
            last = self._runs.pop()
            self._runs[-1] = _merged(self._runs[-1], last)
        return np.arange(first, self._count)


def _merged(one: _Run, other: _Run) -> _Run:
    """The run of two ranges of slots, the second of which follows the first."""
    at = np.searchsorted(one.hashes, other.hashes) + np.arange(len(other))
    from_other = np.zeros(len(one) + len(other), bool)
    from_other[at] = True
    hashes = np.empty(len(from_other), np.uint64)
    hashes[at], hashes[~from_other] = other.hashes, one.hashes
    slots = np.empty(len(from_other), np.uint32)
    slots[at], slots[~from_other] = other.slots + np.uint32(len(one)), one.slots
    return _Run(one.first, pa.concat_arrays([one.keys, other.keys]), hashes, slots)


def _hashes(keys: pa.LargeBinaryArray) -> NDArray[np.uint64]:
    """A 64-bit hash of each key: a polynomial of its bytes, mixed."""
    result = np.empty(len(keys), np.uint64)
    for start in range(0, len(keys), _HASHED_AT_ONCE):
        part = keys[start : start + _HASHED_AT_ONCE]
        result[start : start + len(part)] = _part_hashes(part)
    return result


def _part_hashes(keys: pa.LargeBinaryArray) -> NDArray[np.uint64]:
    _, offset_buffer, data_buffer = keys.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[keys.offset : keys.offset + len(keys) + 1]
    lengths = np.diff(offsets)
    sums = np.zeros(len(keys), np.uint64)
    filled = lengths > 0
    if filled.any():
        data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
        starts = offsets[:-1] - offsets[0]
        position = np.arange(len(data)) - np.repeat(starts, lengths)
        powers = np.cumprod(np.full(int(lengths.max()), _FACTOR))
        terms = (data.astype(np.uint64) + np.uint64(1)) * powers[position]
        sums[filled] = np.add.reduceat(terms, starts[filled])
    mixed = (sums ^ (sums >> np.uint64(31))) * _MIX
    return np.asarray(mixed ^ (mixed >> np.uint64(29)))
