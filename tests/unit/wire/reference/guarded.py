"""A block of memory between two pages that must not be read: the process ends if one is.

Bytes at the end of the block adjoin the page after it, bytes at its start the page before it.
"""

from __future__ import annotations

import ctypes
import mmap

_PROT_NONE = 0


class GuardedBlock:
    """Memory of whole pages, guarded at both ends (POSIX)."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self._pages = -(-size // page)
        self._map = mmap.mmap(-1, (self._pages + 2) * page)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        for address in (first, first + (self._pages + 1) * page):
            done = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(page), _PROT_NONE)
            assert done == 0, ctypes.get_errno()
        self._view = memoryview(self._map)[page : (self._pages + 1) * page]

    def at_end(self, data: bytes) -> memoryview:
        """Return ``data`` before the second guard."""
        view = self._view[len(self._view) - len(data) :]
        view[:] = data
        return view

    def at_start(self, data: bytes) -> memoryview:
        """Return ``data`` after the first guard."""
        view = self._view[: len(data)]
        view[:] = data
        return view
