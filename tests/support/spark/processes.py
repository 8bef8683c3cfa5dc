"""A Spark driver in a process of its own, and Spark's processes with what they have open."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from tests.support.paths import ROOT


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started with ``start_new_session``, and the others of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def driver_process(
    module: str, argument: str, log: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``python -m <module> <argument>``; at the end it and its JVM are killed.

    Its process group has its number, and the JVM and the Python workers are in it.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, argument],
        cwd=ROOT,
        start_new_session=True,
        stdout=log,
        stderr=log,
    )
    try:
        yield process
    finally:
        kill_group(process)


def descendants() -> list[psutil.Process]:
    """The child processes of this one, theirs, and so on."""
    return list(psutil.Process().children(recursive=True))


def open_files() -> dict[int, int]:
    """How many file descriptors each Python process below this one has."""
    found = {}
    for process in _pythons():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = process.num_fds()
    return found


def most_memory() -> int:
    """The most bytes of memory that any Python process below this one ever had (``VmHWM``)."""
    found = [0]
    for process in _pythons():
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            found += [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")]
    return max(found)


def connections_to(port: int) -> dict[int, int]:
    """How many sockets each process below this one has that lead to ``port`` of this machine.

    Processes without one are not there; the JVM would be.
    """
    found: Counter[int] = Counter()
    for process in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            sockets = process.net_connections("tcp")
            found[process.pid] += sum(bool(one.raddr) and one.raddr.port == port for one in sockets)
    return dict(+found)


def _pythons() -> Iterator[psutil.Process]:
    for process in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("pyspark.daemon" in word for word in process.cmdline()):
                yield process
