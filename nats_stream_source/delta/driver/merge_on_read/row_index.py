"""The rows of a table by what identifies them: where each row is, and its order.

The identity of a row, its key in a table of current values, has a slot of
:class:`~nats_stream_source.delta.driver.merge_on_read.key_index.KeyIndex`. Arrays by slot have the
row: data file, position in it, and order (``stream_created``, ``revision``). A slot without a file
(``NO_FILE``) is that of an identity whose row was removed; it takes the slot again when it returns.

A merge looks its keys up once, before its commit. :class:`Found` keeps where they are until the
rows are in a file.

Memory, measured: 56 bytes for each row plus the bytes of its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.delta.cdc.layout import SEQUENCE, Layout
from nats_stream_source.delta.driver.data_files import cast_column
from nats_stream_source.delta.driver.merge_on_read.key_index import (
    Integers,
    KeyIndex,
    Keys,
    encoded_keys,
)
from nats_stream_source.delta.driver.merge_on_read.row_chains import (
    RowChains,
    from_sequence,
    has_starts,
    starts_of,
)
from nats_stream_source.delta.newest import ORDER_COLUMNS, sequence_parts
from nats_stream_source.delta.table import key_columns
from nats_stream_source.errors import ConfigurationError

NO_FILE = -1
"""The file of a slot whose row was removed."""

BYTES_PER_KEY = 56
"""Memory for a row in addition to the bytes of its key."""

_Number = TypeVar("_Number", bound=np.generic)
_OLDEST = int(np.iinfo(np.int64).min)


@dataclass(frozen=True, slots=True)
class Found:
    """Identities of rows that were looked up in the index.

    Attributes:
        keys: the identities.
        slots: the slot of each, with a row or not; -1 for an identity without a slot.
    """

    keys: Keys
    slots: Integers

    def take(self, which: Integers) -> Found:
        """Those at these positions."""
        return Found(self.keys.take(which), self.slots[which])


class RowIndex:
    """See the module.

    Args:
        table: path or URI as the user gave it, for errors.
        schema: the table's columns.
        layout: of a table with one.

    Attributes:
        keys: the columns that identify a row.
        columns: those that are read to index a row.
        several: whether a key can have several rows.
    """

    def __init__(self, table: str, schema: pa.Schema, layout: Layout | None) -> None:
        self._table = table
        self._schema = schema
        self._layout = layout
        self.keys = layout.identity if layout else tuple(key_columns(schema.names))
        # A layout compares sequences of any type, which are read from the rows.
        self.columns = (*self.keys, *(() if layout else ORDER_COLUMNS))
        self.several = layout is not None and self.keys != layout.keys
        self._chains = RowChains() if self.several else None
        self._has_starts = self.several and has_starts(schema.field(self.keys[-1]))
        self._slots = KeyIndex()
        self._file = np.empty(0, np.int32)
        self._row = np.empty(0, np.uint32)
        self._created = np.empty(0, np.int64)
        self._revision = np.empty(0, np.int64)

    def __len__(self) -> int:
        """The number of slots."""
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
    def created(self) -> Integers:
        """``stream_created`` of each slot's row in microseconds; writable."""
        return self._created[: len(self)]

    @property
    def revision(self) -> Integers:
        """The revision of each slot's row; writable."""
        return self._revision[: len(self)]

    @property
    def nbytes(self) -> int:
        """The memory of the index in bytes."""
        arrays = (self._file, self._row, self._created, self._revision)
        chains = self._chains.nbytes if self._chains else 0
        return self._slots.nbytes + sum(array.nbytes for array in arrays) + chains

    def find(self, rows: pa.Table) -> Found:
        """Look up the identities of rows; none of them has a null in it."""
        keys = Keys.of(self._encoded(rows, self.keys))
        return Found(keys, self._slots.find(keys))

    def with_rows(self, slots: Integers) -> Integers:
        """The slots; -1 in place of one without a row."""
        present = slots >= 0
        slots = slots.copy()
        slots[present] = np.where(self.file[slots[present]] == NO_FILE, -1, slots[present])
        return slots

    def newer(self, entries: pa.Table, slots: Integers) -> NDArray[np.bool_]:
        """Whether each entry is newer than the row of its slot, or the slot is -1."""
        present = slots >= 0
        created, revision = order_values_nulls_first(entries)
        at = slots[present]
        newer = np.ones(len(slots), bool)
        newer[present] = (created[present] > self.created[at]) | (
            (created[present] == self.created[at]) & (revision[present] > self.revision[at])
        )
        return newer

    def live(self) -> Integers:
        """The slots of all rows."""
        return np.flatnonzero(self.file != NO_FILE)

    def in_file(self, number: int) -> Integers:
        """The slots whose rows are in a data file."""
        return np.flatnonzero(self.file == number)

    def in_files(self, numbers: Sequence[int]) -> tuple[Integers, NDArray[np.int32]]:
        """The slots whose rows are in one of several data files, and the file of each.

        This method may run beside a change of the index, which takes rows out of these files: a
        slot that it changes is returned as it was before, or is left out.
        """
        chosen = np.zeros(max(numbers) + 2, bool)
        chosen[list(numbers)] = True  # the last one, which NO_FILE selects, is false

        def in_chosen(file: NDArray[np.int32]) -> NDArray[np.bool_]:
            return chosen[np.minimum(file, len(chosen) - 1)]

        file = self.file
        slots = np.flatnonzero(in_chosen(file))
        now = file[slots]  # the change may have put the row of a slot into a file of its own
        still = in_chosen(now)
        return slots[still], now[still]

    def of_keys(self, keys: pa.Table) -> Integers:
        """The slots of the rows of keys, in a table with a layout.

        Args:
            keys: each of them once. If rows have an order and this has the column of a sequence,
                the rows of a key begin with the last one that starts before its sequence.
        """
        assert self._layout is not None
        encoded = self._encoded(keys, self._layout.keys)
        if self._chains is None:
            slots = self.with_rows(self._slots.find(Keys.of(encoded)))
            return np.asarray(slots[slots >= 0])
        slots, of_key = self._chains.slots(encoded)
        live = self.file[slots] != NO_FILE
        slots, of_key = slots[live], of_key[live]
        if self._has_starts and SEQUENCE in keys.column_names:
            since = keys.select([SEQUENCE]).rename_columns([self.keys[-1]])
            order = self.created[slots], self.revision[slots]
            slots = slots[from_sequence(order, of_key, starts_of(since, self._schema))]
        return np.asarray(slots)

    def identities(self, slots: Integers) -> pa.LargeBinaryArray:
        """The identities of slots, as ``encoded_keys`` returns them."""
        return self._slots.keys(slots)

    def add_file(self, number: int, rows: pa.Table, live: Integers) -> None:
        """Add the live rows of a data file.

        Args:
            rows: the indexed columns of all its rows.
            live: the positions of the live rows.

        Raises:
            ConfigurationError: two rows have one identity.
        """
        values = self._encoded(rows, self.keys)
        if values.null_count:  # a row with a null in its key never changes
            live = live[values.is_valid().to_numpy(zero_copy_only=False)[live]]
        if len(live) < len(rows):
            values, rows = values.take(pa.array(live)), rows.take(pa.array(live))
        keys = Keys.of(values)
        self.add(number, rows, live, Found(keys, self._slots.find(keys)))

    def add(self, number: int, rows: pa.Table, positions: Integers, found: Found) -> None:
        """Add rows of a data file whose identities were looked up.

        Args:
            rows: the indexed columns.
            positions: of the rows in their file.
            found: their identities; none of them has been added since.

        Raises:
            ConfigurationError: two rows have one identity.
        """
        slots = found.slots.copy()
        self._require_different(rows, found)
        new = np.flatnonzero(slots < 0)
        slots[new] = self._slots.insert(found.keys.take(new))
        self._reserve()
        self.file[slots], self.row[slots] = number, positions
        if self._layout is None:
            self.created[slots], self.revision[slots] = order_values_nulls_first(rows)
        elif self._chains is not None:
            of_new = rows.select(list(self._layout.keys)).take(pa.array(new))
            self._chains.add(self._encoded(of_new, self._layout.keys), slots[new])
            if self._has_starts:
                order = rows.select([self.keys[-1]])
                self.created[slots], self.revision[slots] = starts_of(order, self._schema)

    def _require_different(self, rows: pa.Table, found: Found) -> None:
        repeated = np.flatnonzero(self.with_rows(found.slots) >= 0)
        at = int(repeated[0]) if len(repeated) else found.keys.first_repeated()
        if at is not None:
            values = ", ".join(f"{name}={rows[name][at].as_py()!r}" for name in self.keys)
            raise ConfigurationError(
                f"could not use table {self._table!r}: it has several rows with {values}, expected "
                f"one row per key; remove the duplicates"
            )

    def _reserve(self) -> None:
        """Grow the arrays to the number of slots."""
        if len(self) > len(self._file):
            capacity = max(len(self), len(self._file) + len(self._file) // 4)
            self._file, self._row = _grown(self._file, capacity), _grown(self._row, capacity)
            self._created = _grown(self._created, capacity)
            self._revision = _grown(self._revision, capacity)

    def _encoded(self, table: pa.Table, columns: Sequence[str]) -> pa.LargeBinaryArray:
        """The values of columns as one for each row."""
        names = list(columns)
        schema = pa.schema([self._schema.field(name) for name in names])
        parts = sequence_parts(table.select(names).cast(schema), names)
        return encoded_keys([part.combine_chunks() for part in parts.columns])


def order_values_nulls_first(table: pa.Table) -> tuple[Integers, Integers]:
    """``stream_created`` in microseconds and ``revision``; a null is older than each value."""
    created = cast_column(table["stream_created"], pa.timestamp("us", tz="UTC"))
    return tuple(
        pc.fill_null(column.cast(pa.int64()), _OLDEST).to_numpy()
        for column in (created, table["revision"])
    )


def _grown(array: NDArray[_Number], capacity: int) -> NDArray[_Number]:
    grown = np.empty(capacity, array.dtype)
    grown[: len(array)] = array
    return grown
