"""Select the scanner that finds the frames of a block: compiled or Python, with the same results.

The compiled one (``compiled_scan.pyx``) is used where the installation has it, else the definition
in Python (``parse.py``). The selection is one of the process: ``connection/connection.py`` reads
it from the environment.

Theory of operation. The compiled scanner accepts frames as servers write them, and stops at other
bytes. ``parse_frame``, the definition, parses one frame there, or raises ProtocolError. So both
scanners accept the same frames and raise the same errors. The compiled one first finds at
most ``_FIRST_COLUMNS`` frames, from which the number of columns for the whole block is estimated.
With it, ``compiled_slices`` copies and searches the fields of frames (``wire/columns.py``).

*Memory for received bytes and their frames is used again.* A block of 4 MiB and the table of its
frames live for a few milliseconds. The C library returns such large pieces to the operating system,
and each new one is paged in again: one page fault per 4 KiB, a sixth of the reader's CPU at 128
bytes per message. An array of a :class:`BufferPool` is a view of a bytearray. When the array and
all views of it are gone, a weak reference returns the bytearray to the pool. NumPy lets the views
of an array refer to that array and not to the bytearray, since the latter is not an array: so the
array lives as long as any of its views, and a piece in use is never returned.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.wire.framing import parse
from nats_stream_source.wire.framing.parse import ACK, NOT_PARSED, Field, Table

if TYPE_CHECKING:
    from nats_stream_source.wire import compiled_slices as compiled_slices
    from nats_stream_source.wire.framing import compiled_scan as compiled_scan
else:
    try:
        from nats_stream_source.wire import compiled_slices
        from nats_stream_source.wire.framing import compiled_scan
    except ImportError:
        compiled_scan = compiled_slices = None

A = TypeVar("A", bound=NDArray[Any])
Scanner: TypeAlias = Literal["compiled", "python"]
"""Name of a scanner."""

_FIRST_COLUMNS = 64
_MAX_GROWTH = 4
_MAX_EXCESS = 4  # a piece is not used for an array of less than 1 / _MAX_EXCESS of its size
MARGIN = 1.1
"""Of an estimated number of frames."""


class BufferPool:
    """Arrays in memory that is used again."""

    __slots__ = ("_unused",)

    def __init__(self) -> None:
        self._unused: deque[bytearray] = deque(maxlen=2)

    def block(self, nbytes: int) -> NDArray[np.uint8]:
        """Return an array of ``nbytes`` bytes with any content."""
        piece = self._piece(nbytes)
        return self._returned(np.ndarray((nbytes,), np.uint8, piece), piece)

    def table(self, rows: int, columns: int) -> NDArray[np.int64]:
        """Return an array of ``rows`` rows and at least ``columns`` columns with any content."""
        size = rows * np.dtype(np.int64).itemsize
        piece = self._piece(size * columns)
        return self._returned(np.ndarray((rows, len(piece) // size), np.int64, piece), piece)

    def _piece(self, nbytes: int) -> bytearray:
        # An array may end, and append its piece, at any moment: also in another thread.
        with contextlib.suppress(IndexError):
            while True:
                piece = self._unused.pop()  # the last one: caches may still have it
                if nbytes <= len(piece) <= nbytes * _MAX_EXCESS:
                    return piece
        return bytearray(nbytes)

    def _returned(self, array: A, piece: bytearray) -> A:
        weakref.finalize(array, self._unused.append, piece).atexit = False
        return array


class Columns:
    """Memory for the frames of one block.

    The compiled scanner appends the frames of each read of the block, so they are adjacent columns
    of one table. The definition makes a new table for each read.

    Args:
        expected: an estimate of the number of frames.
        pool: memory for the table of a large block.
    """

    __slots__ = ("count", "table")

    def __init__(self, expected: int = 0, pool: BufferPool | None = None) -> None:
        self.count = 0
        self.table = _new_table(max(expected, _FIRST_COLUMNS), pool)

    def grow(self, first: int, expected: int) -> None:
        """Continue in a new table with the columns from ``first`` on; about ``expected`` follow."""
        moved = self.count - first
        # At least twice as many, since small frames may follow large ones; and not many more, since
        # large ones may follow.
        fresh = min(max(expected, moved, _FIRST_COLUMNS), max(_MAX_GROWTH * moved, _FIRST_COLUMNS))
        table = _new_table(moved + fresh)
        table[:, :moved] = self.table[:, first : self.count]
        self.table, self.count = table, moved


def _new_table(columns: int, pool: BufferPool | None = None) -> Table:
    rows = len(Field)
    return np.empty((rows, columns), np.int64) if pool is None else pool.table(rows, columns)


def find_frames_compiled(
    buffer: bytes | memoryview,
    begin: int = 0,
    size: int | None = None,
    columns: Columns | None = None,
) -> tuple[Table, int, int]:
    """Find frames with the compiled scanner; as :func:`find_frames`."""
    size = len(buffer) if size is None else size
    columns = columns or Columns()
    first, position, needed = columns.count, begin, 0
    while position < size:
        columns.count, position, needed = compiled_scan.scan(
            buffer, position, size, columns.table, columns.count
        )
        if needed or position == size:
            break
        if columns.count == columns.table.shape[1]:
            found, scanned = columns.count - first, max(position - begin, 1)
            columns.grow(first, int((len(buffer) - position) * found / scanned * MARGIN))
            first = 0
            continue
        row = parse.parse_frame(buffer, position, size)
        if isinstance(row, int):
            needed = row
            break
        columns.table[: Field.DELIVERED, columns.count] = row
        columns.table[ACK, columns.count] = NOT_PARSED
        columns.count += 1
        position = row[Field.STOP]
    return columns.table[:, first : columns.count], position, needed


def in_sequence(table: Table) -> bool:
    """Return whether the frames are consecutive deliveries of one consumer.

    They have one sid, parsed ACK numbers, consecutive consumer sequences and growing stream
    sequences.
    """
    if _selected == "python":
        return False  # the numbers are not parsed
    rows = (Field.SID, Field.DELIVERED, Field.STREAM_SEQ, Field.CONSUMER_SEQ)
    return compiled_scan.in_sequence(*(table[row] for row in rows))


def available() -> tuple[Scanner, ...]:
    """Return the scanners of this installation, the fastest one first."""
    return get_args(Scanner) if compiled_scan is not None else ("python",)


def selected() -> Scanner:
    """Return the scanner that :func:`find_frames` uses."""
    return _selected


def select(name: str | None = None) -> Scanner:
    """Set the scanner of this process, and return its name; see ``connection/connection.py``.

    Args:
        name: ``compiled`` or ``python``. None or empty: the fastest one of this installation.

    Raises:
        ConfigurationError: this installation lacks the scanner ``name``.
    """
    global _selected
    names = available()
    match = next((one for one in names if one == (name or names[0])), None)
    if match is None:
        raise ConfigurationError(
            f"could not select frame scanner {name!r}: this installation has "
            f"{' and '.join(names)}; select one of these, or install a C compiler and reinstall "
            f"the package for 'compiled'"
        )
    _selected = match
    return match


def find_frames(
    buffer: bytes | memoryview,
    begin: int = 0,
    size: int | None = None,
    columns: Columns | None = None,
) -> tuple[Table, int, int]:
    """Find frames with the selected scanner; as :func:`parse.find_frames`.

    Args:
        columns: memory for the frames of a block that is read in several pieces.
    """
    if _selected == "compiled":
        return find_frames_compiled(buffer, begin, size, columns)
    return parse.find_frames(buffer, begin, size)


_selected: Scanner = available()[0]
