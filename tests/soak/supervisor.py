"""Starts the queries' driver again and again, kills it, stops it, and lets the last one finish.

Each is a process (and, with Spark, a JVM and workers) of its own, on the checkpoints that the one
before left.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from pathlib import Path

from soak import collect, processes
from soak.collect import Events
from soak.processes import Memory

_START = 300.0  # seconds for Spark, on a loaded machine
_STOP = 180.0  # seconds for a graceful stop, on a loaded machine
_FINISH = 900.0


class Driver:
    """The driver: one process after the other, on the same checkpoints.

    Args:
        servers: their addresses, for the queries.
        module: what is run, ``soak.driver`` or ``soak.plain``.

    Attributes:
        serial: the number of the last one that was started.
        troubles: what went wrong with the processes themselves.
        unfinished: that the last one did not come to read all, in words.
    """

    def __init__(self, directory: Path, servers: str, module: str) -> None:
        self._module = module
        self._directory = directory
        self._servers = servers
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.serial = 0
        self.troubles: list[str] = []
        self.unfinished: list[str] = []

    @property
    def logs(self) -> list[Path]:
        return sorted(self._directory.glob("driver-*.log"))

    def start(self, *, finish: bool = False) -> None:
        """Start the next one."""
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
        """SIGKILL to it and all that it started."""
        with self._lock:
            if self._process is not None:
                self._unwanted_end()
                processes.kill(self._process)
                self._process = None

    def stop(self) -> None:
        """Let it stop its queries and end."""
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            self._await(process, _STOP)

    def finish(self) -> None:
        """Let another one read to the end; the one before must have ended."""
        self.start(finish=True)
        with self._lock:
            process, self._process = self._process, None
            assert process is not None
            self._await(process, _FINISH, self.unfinished)

    def _await(
        self, process: subprocess.Popen[bytes], seconds: float, late: list[str] | None = None
    ) -> None:
        """Wait for its end; where it takes too long that is said in ``late``, or is a trouble."""
        try:
            if (status := process.wait(seconds)) != 0:
                self.troubles.append(f"driver {self.serial} ended with status {status}")
        except subprocess.TimeoutExpired:
            said = f"driver {self.serial} did not end within {seconds:g} s"
            (self.troubles if late is None else late).append(said)
        finally:
            processes.kill(process)  # the JVM goes a moment later than Python

    def look(self) -> None:
        """Start it again where it ended by itself, which is a trouble of its own."""
        with self._lock:
            if not self._unwanted_end():
                return
            assert self._process is not None
            processes.kill(self._process)
        self.start()

    def _unwanted_end(self) -> bool:
        if self._process is None or (status := self._process.poll()) is None:
            return False
        self.troubles.append(f"driver {self.serial} ended by itself, status {status}")
        return True

    def lively(self) -> bool:
        """Whether each query has read something since the driver was started."""
        return collect.lively(self._directory / "events.jsonl", self.serial)

    def alive(self) -> bool:
        """Whether it runs and has its session."""
        process = self._process
        running = process is not None and process.poll() is None
        return running and self.events().serial == self.serial

    def events(self) -> Events:
        """What the drivers have said so far."""
        return collect.events(self._directory / "events.jsonl")

    def wait_lively(self) -> None:
        """Wait for :meth:`lively`; RuntimeError when it takes too long."""
        end = time.monotonic() + _START
        while not self.lively():
            self.look()
            if time.monotonic() > end:
                raise RuntimeError(f"the queries do not begin to read: {self.logs[-1]}")
            time.sleep(0.2)

    def memory(self) -> Memory | None:
        process = self._process
        return None if process is None else processes.memory(process)
