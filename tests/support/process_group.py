"""The end of a process and of those that it has started, as by a crash of their machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started with ``start_new_session``, and the others of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
