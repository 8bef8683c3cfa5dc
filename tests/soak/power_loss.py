"""The simulated power loss: a server restarts with its store of some seconds ago.

All queries have read beyond that store before, and writers are paused until all queries have
stopped: a stream that was rolled back, then grew past the checkpoint and superseded the message at
the checkpoint, cannot be distinguished from one that was not rolled back
(``rows.data_loss``).
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

from nats_stream_source.embedded import NatsServer
from tests.soak.collect import Events
from tests.soak.schedule import FaultNotInjectedError
from tests.soak.servers import STREAMS, Servers
from tests.support.oracle.evidence import Rollback

_QUERY_TIMEOUT = 300.0  # seconds for all queries to read, or to fail, including a driver start


class PowerLoss:
    """Rolls back the store of a single server."""

    def __init__(
        self,
        servers: Servers,
        events: Callable[[], Events],
        generator: subprocess.Popen[bytes],
        until: Callable[[Callable[[], bool], float], bool],
    ) -> None:
        self._servers = servers
        self._events = events
        self._generator = generator
        self._until = until
        (self._name,) = servers.servers
        self.rollback: Rollback | None = None

    def run(self, delay: Callable[[], object]) -> str:
        """Copy the store, wait for ``delay``, then replace the store with the copy."""
        older = self._servers.servers[self._name].store.with_name(f"{self._name}-older")
        with self._writers_paused():
            kept = self._last_sequences()
            with self._server_down() as server:
                shutil.copytree(server.store, older)
            # Greater than ``kept`` if the server wrote markers of expired entries.
            restarted_at = self._last_sequences()
        delay()
        if not self._until(lambda: self._read_beyond(restarted_at), _QUERY_TIMEOUT):
            raise FaultNotInjectedError("not all queries have read beyond the copied store")
        with self._writers_paused():
            self.rollback = Rollback(time.time(), kept)
            with self._server_down() as server:
                shutil.rmtree(server.store)
                older.rename(server.store)
            stopped = self._until(
                # The query of sites stops too if the server was away during a read.
                lambda: restarted_at.keys() <= self._events().lost.keys(),
                _QUERY_TIMEOUT,
            )
        return "all queries stopped" if stopped else "NOT all queries stopped"

    @contextlib.contextmanager
    def _writers_paused(self) -> Iterator[None]:
        """Pause the generator; the server may still write markers."""
        self._generator.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._generator.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _server_down(self) -> Iterator[NatsServer]:
        self._servers.down.add(self._name)
        server = self._servers.servers[self._name]
        server.kill()
        try:
            yield server
        finally:
            self._servers.start(self._name)
        self._servers.wait_healthy()

    def _last_sequences(self) -> dict[str, int]:
        return {
            source: self._servers.call(f"STREAM.INFO.{stream}")["state"]["last_seq"]
            for source, stream in STREAMS.items()
        }

    def _read_beyond(self, sequences: dict[str, int]) -> bool:
        ends = self._events().ends
        return all(ends.get(source, 0) > seq for source, seq in sequences.items())
