"""The power loss: a server that comes back with the store of some seconds ago.

Every query has read beyond that store by then, and nobody writes until all have noticed: a stream
that has grown past the checkpoint again, with the very message at it superseded, cannot be told
from one that was never set back (``source.continuity``).
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

from nats_stream_source.embedded import NatsServer
from soak.collect import Events
from soak.findings import Loss
from soak.schedule import NothingDoneError
from soak.servers import STREAMS, Servers

_NOTICE = 300.0  # seconds in which all queries read, or fail; a new driver may have to start first


class PowerLoss:
    """One power loss, of a single server.

    Args:
        events: what the queries have said so far.
        until: waits for a condition for some seconds, and says whether it came true.

    Attributes:
        loss: what was lost, from the moment in which it happens.
    """

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
        self.loss: Loss | None = None

    def do(self, meanwhile: Callable[[], object]) -> str:
        """Keep the store, let things go on for as long as ``meanwhile`` takes, and lose the rest.

        Raises:
            NothingDoneError: not every query has come to read what was to be lost.
        """
        older = self._servers.servers[self._name].store.with_name(f"{self._name}-older")
        with self._unwritten():
            kept = self._ends()
            with self._dead() as server:
                shutil.copytree(server.store, older)
            # More than was kept, where markers of expired entries came.
            at = self._ends()
        meanwhile()
        if not self._until(lambda: self._read_beyond(at), _NOTICE):
            raise NothingDoneError("not every query has read what was to be lost")
        with self._unwritten():
            self.loss = Loss(time.time(), kept)
            with self._dead() as server:
                shutil.rmtree(server.store)
                older.rename(server.store)
            noticed = self._until(lambda: self._events().lost.keys() == at.keys(), _NOTICE)
        return "all queries stopped" if noticed else "NOT all queries stopped"

    @contextlib.contextmanager
    def _unwritten(self) -> Iterator[None]:
        """Nobody writes, except the server itself."""
        self._generator.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._generator.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _dead(self) -> Iterator[NatsServer]:
        """The server, killed; afterwards it runs and answers."""
        self._servers.down.add(self._name)
        server = self._servers.servers[self._name]
        server.kill()
        try:
            yield server
        finally:
            self._servers.start(self._name)
        self._servers.wait_healthy()

    def _ends(self) -> dict[str, int]:
        """The last sequence of every stream."""
        return {
            place: self._servers.call(f"STREAM.INFO.{stream}")["state"]["last_seq"]
            for place, stream in STREAMS.items()
        }

    def _read_beyond(self, at: dict[str, int]) -> bool:
        ends = self._events().ends
        return all(ends.get(place, 0) > seq for place, seq in at.items())
