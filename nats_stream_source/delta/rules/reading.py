"""The seam between the rule and an executor: how rows are read, and which changes come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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
        state: rows of the state table; a row with the same identity is replaced.
        contradictions: how many sequences had events with different values.
    """

    upserts: pa.Table
    replaced: Integers
    removed: Integers
    state: pa.Table
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
        return bool(len(self.state)) and not len(self)
