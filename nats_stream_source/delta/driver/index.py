"""The rows of a table by what identifies them: where each row is, and its order.

The identity of a row, its key in a table of current values, has a slot of
:class:`~nats_stream_source.delta.driver.key_index.KeyIndex`. Arrays by slot have the row: data
file, position in it, and order: one integer for each part of the sequence, if all parts are
integers or timestamps. Other sequences are read from the files. A slot without a file (``NO_FILE``)
is that of an identity whose row was removed; it takes the slot again when it returns.

Memory, measured: 56 bytes for each row of entries plus the bytes of its key.

**Several rows of a key,** as in a history or its state table: the identity of a row is longer than
the key, and a *chain* leads from a key to the slots of all its rows. ``head`` has the last slot of
a key, and ``next`` the slot before it. A slot whose row was removed stays in its chain, since the
row with this identity takes it again. Memory: 30 bytes for each key plus its bytes, and 10 for each
row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.delta.driver.key_index import KeyIndex, Keys, encoded_keys
from nats_stream_source.delta.rules.layout import SEQUENCE, Layout
from nats_stream_source.delta.rules.rows import Integers, greater, sequence_parts
from nats_stream_source.errors import ConfigurationError

NO_FILE = -1
"""The file of a slot whose row was removed."""

BYTES_PER_KEY = 56
"""Memory for a row in addition to the bytes of its key."""

_Number = TypeVar("_Number", bound=np.generic)
_NULL = int(np.iinfo(np.int64).min)  # in the order of a row: older than each value


class RowIndex:
    """See the module.

    Attributes:
        columns: those that are read to index a row.
        several: whether a key can have several rows.
    """

    def __init__(self, table: str, schema: pa.Schema, layout: Layout) -> None:
        self._table = table
        self._schema = schema
        self._layout = layout
        self._keys = layout.identity
        self.several = layout.identity != layout.keys
        self._order_schema = pa.schema([schema.field(name) for name in layout.row_order])
        parts = sequence_parts(self._order_schema.empty_table(), layout.row_order).schema.types
        if not all(pa.types.is_integer(kind) or pa.types.is_timestamp(kind) for kind in parts):
            parts = []
        self._order = tuple(np.empty(0, np.int64) for _ in parts)
        order = layout.row_order if parts else ()
        self.columns = tuple(dict.fromkeys((*self._keys, *order)))
        self._chains = _Chains() if self.several else None
        self._slots = KeyIndex()
        self._file = np.empty(0, np.int32)
        self._row = np.empty(0, np.uint32)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def file(self) -> NDArray[np.int32]:
        """The data file of each slot's row; writable."""
        return self._file[: len(self)]

    @property
    def row(self) -> NDArray[np.uint32]:
        """The position of each slot's row in its file; writable."""
        return self._row[: len(self)]

    @property
    def order(self) -> tuple[Integers, ...]:
        """The parts of the order of each slot's row; empty if they are not indexed."""
        return tuple(part[: len(self)] for part in self._order)

    @property
    def nbytes(self) -> int:
        """The memory of the index in bytes."""
        order = sum(part.nbytes for part in self._order)
        chains = self._chains.nbytes if self._chains else 0
        return self._slots.nbytes + self._file.nbytes + self._row.nbytes + order + chains

    # -- looking up -----------------------------------------------------------------------------

    def find(self, rows: pa.Table) -> Integers:
        """The slots of the rows with these identities, none of them null; -1 for no row."""
        return self._with_rows(self._slots.find(self._identities(rows)))

    def of_keys(self, keys: pa.Table) -> Integers:
        """See :class:`nats_stream_source.delta.rules.rows.Reader`."""
        encoded = self._encoded(keys, self._layout.keys)
        if self._chains is None:
            slots = self._with_rows(self._slots.find(Keys.of(encoded)))
            return np.asarray(slots[slots >= 0])
        slots, of_key = self._chains.slots(encoded)
        live = self.file[slots] != NO_FILE
        slots, of_key = slots[live], of_key[live]
        if self._order and SEQUENCE in keys.column_names:
            since = keys.select([SEQUENCE]).rename_columns(self._layout.row_order)
            starts = [part[slots] for part in self.order]
            slots = slots[_from_sequence(starts, of_key, self._order_values(since))]
        return np.asarray(slots)

    def has_columns(self, columns: Sequence[str]) -> bool:
        """Whether :meth:`read_order` has these columns."""
        return bool(self._order) and set(columns) <= {*self._layout.row_order}

    def read_order(self, slots: Integers, columns: Sequence[str]) -> pa.Table:
        """Columns of the order of rows; nulls for the slot -1."""
        present = slots >= 0
        values = (
            np.where(present, part[slots], _NULL) if len(part) else np.full(len(slots), _NULL)
            for part in self.order
        )
        parts = (pa.array(part, mask=part == _NULL) for part in values)
        arrays = {field.name: _joined(field.type, parts) for field in self._order_schema}
        schema = pa.schema([self._schema.field(name) for name in columns])
        return pa.table([arrays[name] for name in columns], schema=schema)

    def in_files(self, numbers: Sequence[int]) -> tuple[Integers, NDArray[np.int32]]:
        """The slots whose rows are in one of several data files, and the file of each.

        This method may run beside a change of the index, which takes rows out of these files: a
        slot that it changes is returned as it was before, or is left out.
        """
        chosen = np.zeros(max(numbers, default=0) + 2, bool)
        chosen[list(numbers)] = True  # the last one, which NO_FILE selects, is false

        def in_chosen(file: NDArray[np.int32]) -> NDArray[np.bool_]:
            return chosen[np.minimum(file, len(chosen) - 1)]

        file = self.file
        slots = np.flatnonzero(in_chosen(file))
        now = file[slots]  # the change may have put the row of a slot into a file of its own
        still = in_chosen(now)
        return slots[still], now[still]

    # -- changing -------------------------------------------------------------------------------

    def add_file(self, number: int, rows: pa.Table, live: Integers) -> None:
        """Add the live rows of a data file.

        Args:
            rows: the indexed columns of all its rows.

        Raises:
            ConfigurationError: two rows have one identity.
        """
        values = self._encoded(rows, self._keys)
        if values.null_count:  # a row with a null in its key never changes
            live = live[values.is_valid().to_numpy(zero_copy_only=False)[live]]
        if len(live) < len(rows):
            values, rows = values.take(pa.array(live)), rows.take(pa.array(live))
        slots = self._slots_of(rows, Keys.of(values))
        self._place(rows, slots, np.full(len(live), number, np.int32), live)

    def put(
        self, rows: pa.Table, replaced: Integers, files: NDArray[np.int32], positions: Integers
    ) -> None:
        """Put written rows in place of others.

        Args:
            rows: with the indexed columns; each identity once.
            replaced: the slot of the row with the same identity, -1 if there is no row.
        """
        slots, new = replaced.copy(), np.flatnonzero(replaced < 0)
        if len(new):
            added = rows.select(self.columns).take(pa.array(new))
            slots[new] = self._slots_of(added, self._identities(added))
        self._place(rows, slots, files, positions)

    def _slots_of(self, rows: pa.Table, keys: Keys) -> Integers:
        """The slots of identities without rows, which get one if they do not have it."""
        slots = self._slots.find(keys)
        repeated = np.flatnonzero(self._with_rows(slots) >= 0)
        at = int(repeated[0]) if len(repeated) else keys.first_repeated()
        if at is not None:
            values = ", ".join(f"{name}={rows[name][at].as_py()!r}" for name in self._keys)
            raise ConfigurationError(
                f"could not use table {self._table!r}: it has several rows with {values}, expected "
                f"one row per key; remove the duplicates"
            )
        new = np.flatnonzero(slots < 0)
        slots[new] = self._slots.insert(keys.take(new))
        self._file, self._row = _grown(self._file, len(self)), _grown(self._row, len(self))
        self._order = tuple(_grown(part, len(self)) for part in self._order)
        if self._chains is not None and len(new):
            of_new = rows.select(list(self._layout.keys)).take(pa.array(new))
            self._chains.add(self._encoded(of_new, self._layout.keys), slots[new])
        return slots

    def _place(
        self, rows: pa.Table, slots: Integers, files: NDArray[np.int32], positions: Integers
    ) -> None:
        self.file[slots], self.row[slots] = files, positions
        if self._order:
            for part, value in zip(self.order, self._order_values(rows), strict=True):
                part[slots] = value

    def _with_rows(self, slots: Integers) -> Integers:
        """The slots; -1 in place of one without a row."""
        present = slots >= 0
        slots = slots.copy()
        slots[present] = np.where(self.file[slots[present]] == NO_FILE, -1, slots[present])
        return slots

    def _order_values(self, rows: pa.Table) -> list[Integers]:
        order = rows.select(list(self._layout.row_order)).cast(self._order_schema)
        parts = sequence_parts(order, self._layout.row_order).columns
        return [pc.fill_null(part.cast(pa.int64()), _NULL).to_numpy() for part in parts]

    def _identities(self, rows: pa.Table) -> Keys:
        return Keys.of(self._encoded(rows, self._keys))

    def _encoded(self, table: pa.Table, columns: Sequence[str]) -> pa.LargeBinaryArray:
        names = list(columns)
        schema = pa.schema([self._schema.field(name) for name in names])
        parts = sequence_parts(table.select(names).cast(schema), names)
        return encoded_keys([part.combine_chunks() for part in parts.columns])


def _joined(kind: pa.DataType, parts: Iterator[pa.Array]) -> pa.Array:
    """The values of a type, whose structs are null if all their fields are."""
    if not pa.types.is_struct(kind):
        return next(parts).cast(kind)
    fields = [_joined(field.type, parts) for field in kind]
    nulls = np.all([part.is_null().to_numpy(zero_copy_only=False) for part in fields], axis=0)
    return pa.StructArray.from_arrays(fields, fields=list(kind), mask=pa.array(nulls))


class _Chains:
    """The slots of the rows of each key; see the module."""

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
        self._head = _grown(self._head, len(self._keys), -1)
        self._next = _grown(self._next, int(slots.max()) + 1, -1)
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


def _from_sequence(
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


def _grown(array: NDArray[_Number], size: int, fill: int = 0) -> NDArray[_Number]:
    if size <= len(array):
        return array
    grown = np.full(max(size, len(array) + len(array) // 4), fill, array.dtype)
    grown[: len(array)] = array
    return grown
