"""The rows of each key in a table with several rows per key: a history, or its state table.

The index finds one row by its identity, which is longer than the key. A chain leads from a key to
the slots of all its rows: ``head`` has the last slot of a key, and ``next`` the slot before it. A
slot whose row was removed stays in its chain, since the row with this identity takes it again.

Memory: 30 bytes for each key plus its bytes, and 10 for each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from nats_stream_source.delta.driver.key_index import KeyIndex, Keys
from nats_stream_source.delta.rules.order import greater
from nats_stream_source.delta.rules.reading import Integers


class RowChains:
    """See the module."""

    def __init__(self) -> None:
        self._keys = KeyIndex()
        self._head = np.empty(0, np.int64)
        self._next = np.empty(0, np.int64)

    @property
    def nbytes(self) -> int:
        """The memory of the chains in bytes."""
        return self._keys.nbytes + int(self._head.nbytes + self._next.nbytes)

    def add(self, keys: pa.LargeBinaryArray, slots: Integers) -> None:
        """Add new slots.

        Args:
            keys: of each slot's row, as ``encoded_keys`` returns them.
            slots: none of them in a chain yet.
        """
        if not len(slots):
            return
        encoded = keys.dictionary_encode()
        distinct = Keys.of(encoded.dictionary)
        numbers = self._keys.find(distinct)
        missing = np.flatnonzero(numbers < 0)
        numbers[missing] = self._keys.insert(distinct.take(missing))
        self._head = _grown(self._head, len(self._keys))
        self._next = _grown(self._next, int(slots.max()) + 1)
        of_row = numbers[encoded.indices.to_numpy()]
        order = np.argsort(of_row, kind="stable")
        of_row, slots = of_row[order], slots[order]
        first = np.diff(of_row, prepend=-1) != 0
        self._next[slots] = np.where(first, self._head[of_row], np.roll(slots, 1))
        last = np.append(first[1:], True)
        self._head[of_row[last]] = slots[last]

    def slots(self, keys: pa.LargeBinaryArray) -> tuple[Integers, Integers]:
        """The slots of the rows of keys and the position of each one's key.

        Slots whose row was removed are among them.

        Args:
            keys: each of them once.
        """
        numbers = self._keys.find(Keys.of(keys))
        of_key = np.flatnonzero(numbers >= 0)
        slots = self._head[numbers[of_key]]
        found, keys_found = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        while len(slots):
            found.append(slots)
            keys_found.append(of_key)
            slots = self._next[slots]
            slots, of_key = slots[slots >= 0], of_key[slots >= 0]
        return np.concatenate(found), np.concatenate(keys_found)


def from_sequence(
    starts: Sequence[Integers], of_key: Integers, since: Sequence[Integers]
) -> Integers:
    """The positions of rows, from the last one of a key that starts before a sequence on.

    Args:
        starts: the parts of the start of each row.
        of_key: the number of each row's key.
        since: the parts of the sequence of each key.
    """
    is_before = greater([part[of_key] for part in since], starts)
    before = np.flatnonzero(is_before)
    before = before[np.lexsort((*(part[before] for part in starts[::-1]), of_key[before]))]
    last = before[np.diff(of_key[before], append=-1) != 0]
    return np.concatenate([np.flatnonzero(~is_before), last])


def _grown(array: Integers, size: int) -> Integers:
    """The array with at least this size, filled with -1."""
    if size <= len(array):
        return array
    grown = np.full(max(size, len(array) + len(array) // 4), -1, np.int64)
    grown[: len(array)] = array
    return grown
