"""Select the scanner that finds the frames of a block: compiled or numpy, with the same results.

The compiled one (``compiled_scan.pyx``) is used where the installation has built it. Without a C
compiler, and in a zip file for ``--py-files``, numpy is used (``wire/scan.py``). The selection is
one of the process: ``connection/frame_scanner.py`` reads it from the environment.

Theory of operation. The compiled scanner accepts frames as servers write them, and stops at other
bytes. ``scan.parse_frame``, the definition, parses one frame there, or raises ProtocolError. So
both scanners accept the same frames and raise the same errors. The compiled one first finds at
most ``_FIRST_COLUMNS`` frames, from which the number of columns for the whole block is estimated.
With it, ``compiled_slices`` copies and searches the fields of frames (``wire/columns.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

import numpy as np

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.wire import scan
from nats_stream_source.wire.buffer_pool import BufferPool

if TYPE_CHECKING:
    from nats_stream_source.wire import compiled_scan
    from nats_stream_source.wire import compiled_slices as compiled_slices
else:
    try:
        from nats_stream_source.wire import compiled_scan, compiled_slices
    except ImportError:
        compiled_scan = compiled_slices = None

Scanner: TypeAlias = Literal["compiled", "numpy"]
"""Name of a scanner."""

_FIRST_COLUMNS = 64
_MAX_GROWTH = 4
MARGIN = 1.1
"""Of an estimated number of frames."""


class Columns:
    """Memory for the frames of one block.

    The compiled scanner appends the frames of each read of the block, so they are adjacent columns
    of one table. The numpy scanner makes a new table for each read.

    Args:
        expected: an estimate of the number of frames.
        pool: memory for the table of a large block.
    """

    __slots__ = ("count", "table")

    def __init__(self, expected: int = 0, pool: BufferPool | None = None) -> None:
        self.count = 0
        self.table = _new_table(max(expected, _FIRST_COLUMNS), pool)

    def grow(self, first: int, expected: int) -> None:
        """Continue in a new table, with the columns from ``first`` on.

        Args:
            expected: an estimate of the number of frames that follow.
        """
        moved = self.count - first
        # At least twice as many, since small frames may follow large ones; and not many more, since
        # large ones may follow.
        fresh = min(max(expected, moved, _FIRST_COLUMNS), max(_MAX_GROWTH * moved, _FIRST_COLUMNS))
        table = _new_table(moved + fresh)
        table[:, :moved] = self.table[:, first : self.count]
        self.table, self.count = table, moved


def _new_table(columns: int, pool: BufferPool | None = None) -> scan.Table:
    rows = scan.FIELDS + scan.ACKS
    return np.empty((rows, columns), np.int64) if pool is None else pool.table(rows, columns)


class FindFrames(Protocol):
    """The signature of :func:`find_frames`."""

    def __call__(
        self,
        buffer: bytes | memoryview,
        begin: int = 0,
        size: int | None = None,
        columns: Columns | None = None,
    ) -> tuple[scan.Table, int, int]:
        """Find the complete frames."""


def find_frames_compiled(
    buffer: bytes | memoryview,
    begin: int = 0,
    size: int | None = None,
    columns: Columns | None = None,
) -> tuple[scan.Table, int, int]:
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
        row = scan.parse_frame(buffer, position, size)
        if isinstance(row, int):
            needed = row
            break
        columns.table[: scan.FIELDS, columns.count] = row
        columns.table[scan.FIELDS :, columns.count] = -1
        columns.count += 1
        position = row[1]
    return columns.table[:, first : columns.count], position, needed


def find_frames_numpy(
    buffer: bytes | memoryview,
    begin: int = 0,
    size: int | None = None,
    columns: Columns | None = None,
) -> tuple[scan.Table, int, int]:
    """Find frames with numpy; as :func:`find_frames`."""
    return scan.find_frames(buffer, begin, size)


def in_sequence(table: scan.Table) -> bool:
    """Return whether the frames are consecutive deliveries of one consumer.

    They have one sid, parsed ACK numbers, consecutive consumer sequences and growing stream
    sequences.
    """
    sid, (delivered, stream_seq, consumer_seq) = table[3], table[scan.FIELDS : scan.FIELDS + 3]
    if _selected == "compiled":
        return compiled_scan.in_sequence(sid, delivered, stream_seq, consumer_seq)
    if not sid.size or sid.min() != sid.max() or delivered.min() < 0:
        return False
    grows = stream_seq[1:] > stream_seq[:-1]
    return bool(grows.all() and (consumer_seq[1:] - consumer_seq[:-1] == 1).all())


def available() -> tuple[Scanner, ...]:
    """Return the scanners of this installation, the fastest one first."""
    return get_args(Scanner) if compiled_scan is not None else ("numpy",)


def selected() -> Scanner:
    """Return the scanner that :func:`find_frames` uses."""
    return _selected


def select(name: str | None = None) -> Scanner:
    """Set the scanner of this process, and return its name; see ``connection/frame_scanner.py``.

    Args:
        name: ``compiled`` or ``numpy``. None or empty: the fastest one of this installation.

    Raises:
        ConfigurationError: this installation lacks the scanner ``name``.
    """
    global _selected, _find
    names = available()
    match = next((one for one in names if one == (name or names[0])), None)
    if match is None:
        raise ConfigurationError(
            f"could not select frame scanner {name!r}: this installation has "
            f"{' and '.join(names)}; select one of these, or install a C compiler and reinstall "
            f"the package for 'compiled'"
        )
    _selected = match
    _find = find_frames_compiled if match == "compiled" else find_frames_numpy
    return match


def find_frames(
    buffer: bytes | memoryview,
    begin: int = 0,
    size: int | None = None,
    columns: Columns | None = None,
) -> tuple[scan.Table, int, int]:
    """Find the complete frames of ``buffer[begin:size]``, which starts with a frame.

    Args:
        columns: memory for the frames of a block that is read in several pieces.

    Returns:
        the frames; the position of the unfinished tail; the length of the unfinished frame in
        bytes, 0 while its control line is incomplete.

    Raises:
        ProtocolError: the bytes at some position are not a frame.
    """
    return _find(buffer, begin, size, columns)


_selected: Scanner
_find: FindFrames
select()
