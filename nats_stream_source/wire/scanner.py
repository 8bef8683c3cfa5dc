"""Select the scanner that finds the frames of a block: compiled or numpy, with the same results.

The compiled one (``compiled_scan.pyx``) is used where the installation has built it. Without a C
compiler, and in a zip file for ``--py-files``, numpy is used (``wire/scan.py``). The selection is
one of the process: ``connection/frame_scanner.py`` reads it from the environment.

Theory of operation. The compiled scanner accepts frames as servers write them, and stops at other
bytes. ``scan.parse_frame``, the definition, parses one frame there, or raises ProtocolError. So
both scanners accept the same frames and raise the same errors. The first call finds at most
``_FIRST_COLUMNS`` frames, from which the number of columns of the table is estimated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

import numpy as np

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.wire import scan

if TYPE_CHECKING:
    from nats_stream_source.wire import compiled_scan
else:
    try:
        from nats_stream_source.wire import compiled_scan
    except ImportError:
        compiled_scan = None

Scanner: TypeAlias = Literal["compiled", "numpy"]
"""Name of a scanner."""

_FIRST_COLUMNS = 64
_MARGIN = 1.1  # of the estimated number of columns
_MAX_UNUSED = 2  # a table with more columns per frame is copied, to release its memory


class FindFrames(Protocol):
    """The signature of :func:`find_frames`."""

    def __call__(
        self, buffer: bytes | memoryview, begin: int = 0, size: int | None = None
    ) -> tuple[scan.Table, int, int]:
        """Find the complete frames."""


def find_frames_compiled(
    buffer: bytes | memoryview, begin: int = 0, size: int | None = None
) -> tuple[scan.Table, int, int]:
    """Find frames with the compiled scanner; as :func:`find_frames`."""
    size = len(buffer) if size is None else size
    table = np.empty((scan.FIELDS + scan.ACKS, _FIRST_COLUMNS), np.int64)
    count, position, needed = 0, begin, 0
    while position < size:
        count, position, needed = compiled_scan.scan(buffer, position, size, table, count)
        if needed or position == size:
            break
        if count == table.shape[1]:
            remaining = (size - position) * count / (position - begin)
            # At least twice as many: small frames may follow large ones.
            table = _resized(table, count, count + max(int(remaining * _MARGIN), count))
            continue
        row = scan.parse_frame(buffer, position, size)
        if isinstance(row, int):
            needed = row
            break
        table[: scan.FIELDS, count] = row
        table[scan.FIELDS :, count] = -1
        count += 1
        position = row[1]
    if count * _MAX_UNUSED < table.shape[1]:
        table = _resized(table, count, count)
    return table[:, :count], position, needed


def _resized(table: scan.Table, count: int, columns: int) -> scan.Table:
    resized = np.empty((table.shape[0], columns), np.int64)
    resized[:, :count] = table[:, :count]
    return resized


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
    _find = find_frames_compiled if match == "compiled" else scan.find_frames
    return match


def find_frames(
    buffer: bytes | memoryview, begin: int = 0, size: int | None = None
) -> tuple[scan.Table, int, int]:
    """Find the complete frames of ``buffer[begin:size]``, which starts with a frame.

    Returns:
        the frames; the position of the unfinished tail; the length of the unfinished frame in
        bytes, 0 while its control line is incomplete.

    Raises:
        ProtocolError: the bytes at some position are not a frame.
    """
    return _find(buffer, begin, size)


_selected: Scanner
_find: FindFrames
select()
