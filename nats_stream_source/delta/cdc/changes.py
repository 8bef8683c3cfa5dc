"""What a batch of events changes: rows of the table, and events that its state table gets.

Pure: Arrow tables in, Arrow tables out. Every engine calls :func:`changes_of` with functions that
read the rows and the state of the events' keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

Reader = Callable[[pa.Table, Sequence[str]], pa.Table]
"""Reads columns of the rows that have one of some keys: ``read(keys, columns)``.

Where the keys have a column ``__SEQUENCE``, a reader can leave out rows of a history or a state
table that are before the last one that begins before this sequence: an event with the sequence of
a row can go on with the row before.
"""


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Changes of a table and of its state table.

    Attributes:
        upserts: rows of the table; a row with the same identity is replaced.
        removed: the identity of rows that are removed.
        state: rows of the state table; a row with the same identity is replaced.
        contradictions: how many sequences had events with different values.
    """

    upserts: pa.Table
    removed: pa.Table
    state: pa.Table
    contradictions: int

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
