"""Processes of Spark's, and what each of them has open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tests.support.leak_check import descendants


def open_files() -> dict[int, int]:
    """How many file descriptors each Python process below this one has."""
    found = {}
    for pid in _pythons():
        with contextlib.suppress(OSError):  # it has ended
            found[pid] = len(os.listdir(f"/proc/{pid}/fd"))
    return found


def most_memory() -> int:
    """The most bytes of memory that any Python process below this one ever had (``VmHWM``)."""
    found = [0]
    for pid in _pythons():
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            found += [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")]
    return max(found)


def connections_to(port: int) -> dict[int, int]:
    """How many sockets each process below this one has that lead to ``port`` of this machine.

    Processes without one are not there; the JVM would be.
    """
    found = {}
    for pid in descendants():
        with contextlib.suppress(OSError):  # it has ended
            leading = _leading_to(pid, port)
            links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
            if count := sum(name in leading for name in links):
                found[pid] = count
    return found


def _pythons() -> list[int]:
    found = []
    for pid in descendants():
        with contextlib.suppress(OSError):  # it has ended
            if b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def _leading_to(pid: int, port: int) -> set[str]:
    """TCP sockets to ``port``, by the names that file descriptors have."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    # The other side's address, as 0100007F:1F90, is the third word; the socket's number the tenth.
    words = (line.split() for line in lines)
    return {f"socket:[{one[9]}]" for one in words if int(one[2].split(":")[1], 16) == port}
