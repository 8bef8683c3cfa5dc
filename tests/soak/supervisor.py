"""Starts, kills, stops and restarts the driver of the queries.

Each driver is a new process (with Spark, also a JVM and workers) on the checkpoints of the previous
one. The last driver reads all messages and ends.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from pathlib import Path

from tests.soak import collect, processes
from tests.soak.collect import Events
from tests.soak.processes import Memory

_START_TIMEOUT = 300.0  # seconds for Spark, on a busy machine
_STOP_TIMEOUT = 180.0  # seconds for a graceful stop, on a busy machine
_FINISH_TIMEOUT = 900.0


class DriverSupervisor:
    """Runs one driver process after the other on the same checkpoints.

    Args:
        servers: URLs for the queries.
        module: the module to run, ``soak.driver`` or ``tests.soak.driver_without_spark``.

    Attributes:
        serial: number of the last started driver.
        harness_errors: unexpected ends of the processes.
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
            lost = self.events().lost
            request = self._directory / "driver.json"
            request.write_text(
                json.dumps(
                    {
                        "servers": self._servers,
                        "directory": str(self._directory),
                        "finish": finish,
                        "skip": sorted(lost),
                        "serial": self.serial,
                    }
                )
            )
            log = self._directory / f"driver-{self.serial:03}.log"
            self._process = processes.start(self._module, request, log)

    def kill(self) -> None:
        """Send SIGKILL to the driver and all its child processes."""
        with self._lock:
            if self._process is not None:
                self._ended_unexpectedly()
                processes.kill(self._process)
                self._process = None

    def stop(self) -> None:
        """Stop the queries and the driver gracefully."""
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            self._wait(process, _STOP_TIMEOUT)

    def finish(self) -> None:
        """Run a last driver that reads all messages; the previous one must have ended."""
        self.start(finish=True)
        with self._lock:
            process, self._process = self._process, None
            assert process is not None
            self._wait(process, _FINISH_TIMEOUT, self.unfinished)

    def _wait(
        self, process: subprocess.Popen[bytes], seconds: float, timeouts: list[str] | None = None
    ) -> None:
        """Wait for the end of the process; a timeout is added to ``timeouts`` or harness errors."""
        try:
            if (status := process.wait(seconds)) != 0:
                self.harness_errors.append(f"driver {self.serial} ended with status {status}")
        except subprocess.TimeoutExpired:
            text = f"driver {self.serial} did not end within {seconds:g} s"
            (self.harness_errors if timeouts is None else timeouts).append(text)
        finally:
            processes.kill(process)  # the JVM ends shortly after Python

    def restart_if_ended(self) -> None:
        """Restart the driver if it ended unexpectedly, which is a harness error."""
        with self._lock:
            if not self._ended_unexpectedly():
                return
            assert self._process is not None
            processes.kill(self._process)
        self.start()

    def _ended_unexpectedly(self) -> bool:
        if self._process is None or (status := self._process.poll()) is None:
            return False
        self.harness_errors.append(f"driver {self.serial} ended unexpectedly with status {status}")
        return True

    def is_reading(self) -> bool:
        """Whether each query has finished a micro-batch since the driver was started."""
        return collect.is_reading(self._directory / "events.jsonl", self.serial)

    def alive(self) -> bool:
        """Whether the driver runs and has its session."""
        process = self._process
        running = process is not None and process.poll() is None
        return running and self.events().serial == self.serial

    def events(self) -> Events:
        """The events of all drivers so far."""
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
        return None if process is None else processes.memory(process)
