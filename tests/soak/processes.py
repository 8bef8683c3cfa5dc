"""Processes of a soak: each runs in a separate POSIX session, which its child processes share.

Spark's Python workers leave the process group of their parent, but not its session: killing all
processes of a driver's session includes the JVM and all workers, as the loss of a machine does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

_PAGE = os.sysconf("SC_PAGE_SIZE")


def start(module: str, request: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start ``python -m <module> <request>`` in a new session, with its output in ``log``.

    Its standard input is a pipe. Closing the pipe requests a graceful stop.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(request)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )


def members(session: int) -> list[int]:
    """Process ids of a session."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                # The process name, in parentheses, may contain any character.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    pids.append(int(entry.name))
    return pids


def kill(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to all processes of the session of ``process``, and wait for their end."""
    end = time.monotonic() + 30
    while remaining := members(process.pid):
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            raise RuntimeError(f"could not kill processes {remaining} within 30 s")
        time.sleep(0.02)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    process.wait()


@dataclass(frozen=True, slots=True)
class Memory:
    """The resident memory of a driver's processes, in MiB.

    Attributes:
        driver: the Python driver.
        jvm: the JVM.
        worker: the largest Python worker, including planners; without Spark, the largest query.
        workers: number of Python workers.
    """

    driver: float
    jvm: float
    worker: float
    workers: int


def memory(process: subprocess.Popen[bytes]) -> Memory:
    """The resident memory of the processes of a session."""
    driver = jvm = worker = 0.0
    workers = 0
    for pid in members(process.pid):
        with contextlib.suppress(OSError, ValueError):
            mib = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 2**20
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid == process.pid:
                driver = mib
            elif b"java" in command.split(b"\0")[0]:
                jvm = max(jvm, mib)
            elif b"pyspark" in command or b"tests.soak.driver_without_spark" in command:
                workers += 1
                worker = max(worker, mib)
    return Memory(driver, jvm, worker, workers)
