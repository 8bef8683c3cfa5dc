"""The live data files of a table's version, each with its deletion vector and a number.

A file keeps its number when its vector changes, so the index of keys names a row by the number of
its file and its position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap64

from nats_stream_source.delta.driver.delta_log import Action, FileId, file_id


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A live data file.

    Attributes:
        add: its action in the log.
        rows: the number of its rows, removed ones included.
        vector: the removed rows; never changed in place.
    """

    add: Action
    rows: int
    vector: BitMap64

    def live_positions(self) -> NDArray[np.int64]:
        """The positions of the rows that are not removed, in ascending order."""
        alive = np.ones(self.rows, bool)
        alive[positions(self.vector)] = False
        return np.flatnonzero(alive)

    @property
    def live_rows(self) -> int:
        """The number of rows that are not removed."""
        return self.rows - len(self.vector)

    @property
    def live_bytes(self) -> int:
        """The estimated size of the rows that are not removed."""
        return int(self.add["size"] * self.live_rows // max(1, self.rows))


def positions(rows: BitMap64) -> NDArray[np.int64]:
    """The rows of a vector as an array, in ascending order."""
    return np.fromiter(rows, np.int64, len(rows))


class LiveFiles:
    """Live files by number."""

    def __init__(self) -> None:
        self._files: dict[int, LiveFile] = {}
        self._numbers: dict[FileId, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, number: int) -> bool:
        return number in self._files

    def __getitem__(self, number: int) -> LiveFile:
        return self._files[number]

    def items(self) -> Iterator[tuple[int, LiveFile]]:
        """The files with their numbers."""
        yield from self._files.items()

    def identities(self) -> dict[FileId, int]:
        """The number of each file by its identity in the log."""
        return dict(self._numbers)

    def add(self, file: LiveFile) -> int:
        """Add a file; its number."""
        number, self._next = self._next, self._next + 1
        self._files[number] = file
        self._numbers[file_id(file.add)] = number
        return number

    def replace(self, number: int, file: LiveFile | None) -> None:
        """Replace a file by itself with another vector, or remove it."""
        del self._numbers[file_id(self._files.pop(number).add)]
        if file is not None:
            self._files[number] = file
            self._numbers[file_id(file.add)] = number
