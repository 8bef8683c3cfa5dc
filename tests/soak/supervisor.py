"""Processes of a soak, and the supervisor of the driver of the queries.

Each process runs in a POSIX session of its own, which its child processes share. Spark's Python
workers leave the process group of their parent, but not its session: killing all processes of a
driver's session includes the JVM and all workers, as the loss of a machine does.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.soak import collect
from tests.soak.collect import Events
from tests.support.paths import ROOT

_START_TIMEOUT = 300.0  # seconds for Spark, on a busy machine
_STOP_TIMEOUT = 180.0  # seconds for a graceful stop, on a busy machine
_FINISH_TIMEOUT = 900.0


def start(module: str, directory: Path, name: str, **request: Any) -> subprocess.Popen[bytes]:
    """Start ``python -m <module> <file>`` in a new session; the JSON file has the request and
    the directory.

    Its output is in ``<name>.log``. Its standard input is a pipe: closing it requests a graceful
    stop.
    """
    file = directory / f"{name}.json"
    file.write_text(json.dumps({"directory": str(directory), **request}))
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    with (directory / f"{name}.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(file)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )


def _members(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to all processes of the session of ``process``, and wait for their end."""
    end = time.monotonic() + 30
    while remaining := _members(process.pid):
        for one in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        if time.monotonic() > end:
            raise RuntimeError(f"could not kill processes {remaining} within 30 s")
        time.sleep(0.02)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    process.wait()


@dataclass(frozen=True, slots=True)
class Memory:
    """The resident memory of a driver's processes, in MiB."""

    driver: float = 0.0
    jvm: float = 0.0
    worker: float = 0.0


def _memory(driver: subprocess.Popen[bytes]) -> Memory:
    largest = dict.fromkeys(("driver", "jvm", "worker"), 0.0)
    for process in _members(driver.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            java = process.name() == "java"
            role = "driver" if process.pid == driver.pid else "jvm" if java else "worker"
            largest[role] = max(largest[role], process.memory_info().rss / 2**20)
    return Memory(**largest)


class DriverSupervisor:
    """Runs one driver process after the other on the same checkpoints.

    The last driver reads all messages and ends.

    Attributes:
        unfinished: a text if the last driver did not read all messages in time.
    """

    def __init__(self, directory: Path, servers: str, module: str) -> None:
        self._module = module
        self._directory = directory
        self._servers = servers
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.serial = 0
        self.harness_errors: list[str] = []
        self.unfinished: list[str] = []

    @property
    def logs(self) -> list[Path]:
        return sorted(self._directory.glob("driver-*.log"))

    def start(self, *, finish: bool = False) -> None:
        """Start the next driver; with ``finish`` it reads all messages and ends."""
        with self._lock:
            self.serial += 1
            self._process = start(
                self._module,
                self._directory,
                f"driver-{self.serial:03}",
                servers=self._servers,
                finish=finish,
                skip=sorted(self.events().lost),
                serial=self.serial,
            )

    def kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._ended_unexpectedly()
                kill(self._process)
                self._process = None

    def stop(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            self._wait(process, _STOP_TIMEOUT, self.harness_errors)

    def finish(self) -> None:
        """Run a last driver that reads all messages; the previous one must have ended."""
        self.start(finish=True)
        with self._lock:
            process, self._process = self._process, None
            assert process is not None
            self._wait(process, _FINISH_TIMEOUT, self.unfinished)

    def _wait(self, process: subprocess.Popen[bytes], seconds: float, timeouts: list[str]) -> None:
        try:
            if (status := process.wait(seconds)) != 0:
                self.harness_errors.append(f"driver {self.serial} ended with status {status}")
        except subprocess.TimeoutExpired:
            timeouts.append(f"driver {self.serial} did not end within {seconds:g} s")
        finally:
            kill(process)  # the JVM ends shortly after Python

    def restart_if_ended(self) -> None:
        """Restart the driver if it ended unexpectedly, which is a harness error."""
        with self._lock:
            if not self._ended_unexpectedly():
                return
            assert self._process is not None
            kill(self._process)
        self.start()

    def _ended_unexpectedly(self) -> bool:
        if self._process is None or (status := self._process.poll()) is None:
            return False
        self.harness_errors.append(f"driver {self.serial} ended unexpectedly with status {status}")
        return True

    def is_reading(self) -> bool:
        """Whether each query has finished a micro-batch since the driver was started."""
        events = self.events()
        return events.serial == self.serial and events.reading >= collect.STREAMS.keys()

    def events(self) -> Events:
        return collect.read_events(self._directory / "events.jsonl")

    def wait_reading(self) -> None:
        """Wait for :meth:`is_reading`; raises RuntimeError after a timeout."""
        end = time.monotonic() + _START_TIMEOUT
        while not self.is_reading():
            self.restart_if_ended()
            if time.monotonic() > end:
                raise RuntimeError(f"the queries did not start to read; see {self.logs[-1]}")
            time.sleep(0.2)

    def memory(self) -> Memory | None:
        process = self._process
        return None if process is None else _memory(process)
