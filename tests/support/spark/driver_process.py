"""A Spark driver in a process of its own, which is killed as by a crash of its machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

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
