"""The rows of small data files in memory: those that were written lately.

A compaction reads the files of the last commits, which took most of its time. A version of a
history is closed by writing its row again, so each batch reads the open rows of its keys, mostly in
files that were written lately, too. A data file never changes, so its rows can be kept while it is
live and there is room; the file that was used the longest time ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict

import pyarrow as pa

LARGEST_FILE = 4 << 20
"""Size of a data file up to which its rows are kept."""

_MAX_BYTES = 64 << 20


class RowCache:
    """Rows by the path of their data file."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, pa.Table] = OrderedDict()
        self._bytes = 0

    def get(self, path: str) -> pa.Table | None:
        """The rows of a file, removed ones included; None if they are not kept."""
        if path in self._files:
            self._files.move_to_end(path)
        return self._files.get(path)

    def put(self, path: str, rows: pa.Table) -> None:
        """Keep the rows of a file that is not kept."""
        self._files[path] = rows
        self._bytes += rows.nbytes
        while self._bytes > _MAX_BYTES:
            self._bytes -= self._files.popitem(last=False)[1].nbytes

    def drop(self, path: str) -> None:
        """Drop the rows of a file that is no longer live."""
        if (rows := self._files.pop(path, None)) is not None:
            self._bytes -= rows.nbytes
