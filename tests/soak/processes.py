"""Processes of a soak: each begins a session of its own, so that all that it starts can be found.

Spark's Python workers leave their parent's process group, but not its session: killing a driver by
its session kills the JVM and all workers with it, as a machine that goes away does.
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

TESTS = Path(__file__).resolve().parents[1]
_PAGE = os.sysconf("SC_PAGE_SIZE")


def start(module: str, request: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start ``python -m <module> <request>`` in a session of its own; its output goes to ``log``.

    Its standard input is a pipe: to close it is the signal to end in good order.
    """
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
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
    """The processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                # The name, in parentheses, may hold anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to every process of the session that ``process`` began; returns when all are gone."""
    end = time.monotonic() + 30
    while left := members(process.pid):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            raise RuntimeError(f"processes {left} do not go away")
        time.sleep(0.02)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    process.wait()


@dataclass(frozen=True, slots=True)
class Memory:
    """The resident memory of a driver's processes, in MiB.

    Attributes:
        driver: of the Python driver.
        jvm: of the JVM.
        worker: of the largest Python worker; planners are among them. Without Spark, of a query.
        workers: how many Python workers there are.
    """

    driver: float
    jvm: float
    worker: float
    workers: int


def memory(process: subprocess.Popen[bytes]) -> Memory:
    """What the processes of a session take now."""
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
            elif b"pyspark" in command or b"soak.plain" in command:
                workers += 1
                worker = max(worker, mib)
    return Memory(driver, jvm, worker, workers)
