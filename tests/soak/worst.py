"""What the schedule says, done to servers, connections and the driver.

Each fault says what it did, and :class:`NothingDoneError` when there was nothing to do it to (no
consumer to delete, no delivery to drop): a fault counts only if it happened. Afterwards everything
that it ended runs again.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import nats.errors
from faults.harm import Harm, Share, Status, each
from faults.proxy import Verdict, is_delivery, pending

from nats_stream_source.embedded import NatsServer
from soak.collect import Events
from soak.schedule import POWER_LOSS, Fault
from soak.servers import STREAMS, Servers

_PATIENCE = 30.0  # seconds to find something to do it to
_START = 120.0  # seconds in which a new driver reads; more is not waited for
_FAILED = (RuntimeError, OSError, AssertionError, nats.errors.Error)


class NothingDoneError(Exception):
    """The fault did not happen."""


class Bereave(Harm):
    """Once: a delivery does not come, and the reader's consumer that made it is deleted."""

    def __init__(self, call: Callable[[str], object]) -> None:
        super().__init__(False)
        self._call = call
        self._lock = threading.Lock()
        self.consumer = ""

    def hits(self, frame: bytes) -> bool:
        if not is_delivery(frame) or not self._lock.acquire(blocking=False):
            return False  # every proxy has a thread of its own
        try:
            stream, consumer = _consumer(frame)
            if self.done or not consumer.startswith("spark-"):
                return False
            self._call(f"CONSUMER.DELETE.{stream}.{consumer}")
        except _FAILED:
            return False  # no leader now; the next one perhaps
        finally:
            self._lock.release()
        self.consumer = f"{consumer} of {stream}"
        return True


class Newest(Harm):
    """Deliveries after which the consumer has nothing more."""

    def hits(self, frame: bytes) -> bool:
        return is_delivery(frame) and pending(frame) == 0


class Driving(Protocol):
    """What a fault does to the Spark driver."""

    def kill(self) -> None: ...
    def stop(self) -> None: ...
    def start(self) -> None: ...
    def lively(self) -> bool: ...
    def events(self) -> Events: ...


@dataclass(frozen=True, slots=True)
class Done:
    """A fault that was due.

    Attributes:
        at: seconds after the start.
        happened: whether there was anything to do it to.
        said: what was done, or why not.
    """

    fault: Fault
    at: float
    happened: bool
    said: str


class Worst:
    """Does faults; each lane calls :meth:`do` from a thread of its own."""

    def __init__(
        self,
        servers: Servers,
        driver: Driving,
        generator: subprocess.Popen[bytes],
        seed: int,
        over: threading.Event,
        began: float,
    ) -> None:
        self._servers = servers
        self._driver = driver
        self._generator = generator
        self._seed = seed
        self._over = over
        self._began = began
        self._kinds: dict[str, Callable[[Fault], str]] = {
            "kill server": self._kill_server,
            "kill leader": self._kill_server,
            "pause server": self._pause_server,
            "pause leader": self._pause_server,
            "restart server": self._restart_server,
            "rolling restart": self._rolling_restart,
            "kill all servers": self._kill_all,
            "step down stream": self._step_down,
            "step down meta": self._step_down,
            "delete a consumer": self._delete_consumer,
            "reset connections": self._reset,
            "drop deliveries": self._drop,
            "drop heartbeats": self._drop,
            "hold traffic": self._hold,
            POWER_LOSS: self._power_loss,
            "kill driver": self._end_driver,
            "stop driver": self._end_driver,
        }

    def do(self, fault: Fault) -> Done:
        """Do one fault; returns when it is over."""
        at = time.monotonic() - self._began
        try:
            said, happened = self._kinds[fault.kind](fault), True
        except (NothingDoneError, *_FAILED) as error:
            said, happened = f"{type(error).__name__}: {error}"[:200], False
        return Done(fault, at, happened, said)

    # -- servers --------------------------------------------------------------------------------

    def _target(self, fault: Fault) -> str:
        """A server's name."""
        servers = self._servers
        if fault.target in servers.servers:
            return fault.target
        stream = STREAMS[fault.target]
        leader = servers._report(stream).get("leader")
        if leader not in servers.servers:
            raise NothingDoneError(f"{stream} has no leader now")
        return str(leader)

    def _kill_server(self, fault: Fault) -> str:
        name = self._target(fault)
        servers = self._servers
        servers.down.add(name)
        try:
            servers.servers[name].kill()
            self._over.wait(fault.seconds)
        finally:
            self._up(name)
        return name

    def _kill_all(self, fault: Fault) -> str:
        servers = self._servers
        servers.down |= servers.servers.keys()
        try:
            for server in servers.servers.values():
                server.kill()
            self._over.wait(fault.seconds)
        finally:
            for name in servers.servers:
                self._up(name)
        return "all"

    def _pause_server(self, fault: Fault) -> str:
        name = self._target(fault)
        servers = self._servers
        servers.down.add(name)
        servers.servers[name].pause()
        try:
            self._over.wait(fault.seconds)
        finally:
            servers.servers[name].resume()
            servers.down.discard(name)
        return name

    def _restart_server(self, fault: Fault) -> str:
        for name, server in self._servers.servers.items():
            self._restart(name, server)
        return "n1"

    def _rolling_restart(self, fault: Fault) -> str:
        for name, server in self._servers.servers.items():
            self._restart(name, server)
            self._servers.wait_healthy()
        return "all, one after the other"

    def _restart(self, name: str, server: NatsServer) -> None:
        self._servers.down.add(name)
        try:
            server.terminate()
        finally:
            self._up(name)

    def _power_loss(self, fault: Fault) -> str:
        """The server comes back with the store of some seconds ago: what came later is gone.

        Every query has read beyond that by then, and nobody writes until it has noticed: a stream
        that has grown past the checkpoint again, with the very message at it superseded, cannot be
        told from one that was never set back (``source.continuity``).
        """
        name, server = next(iter(self._servers.servers.items()))
        older = server.store.with_name(f"{name}-older")
        server.kill()
        shutil.copytree(server.store, older)
        server.start()
        at = {
            place: self._servers.call(f"STREAM.INFO.{stream}")["state"]["last_seq"]
            for place, stream in STREAMS.items()
        }
        self._over.wait(fault.seconds)
        if not self._until_true(lambda: self._read_beyond(at)):
            raise NothingDoneError("not every query has read what was to be lost")
        self._generator.send_signal(signal.SIGSTOP)
        try:
            server.kill()
            shutil.rmtree(server.store)
            older.rename(server.store)
            server.start()
            noticed = self._until_true(lambda: self._driver.events().lost.keys() == at.keys())
        finally:
            self._generator.send_signal(signal.SIGCONT)
        return "all queries stopped" if noticed else "NOT all queries stopped"

    def _read_beyond(self, at: dict[str, int]) -> bool:
        ends = self._driver.events().ends
        return all(ends.get(place, 0) > seq for place, seq in at.items())

    def _until_true(self, condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + _START
        while time.monotonic() < end and not self._over.wait(0.3):
            if condition():
                return True
        return False

    def _up(self, name: str) -> None:
        self._servers.servers[name].start()
        self._servers.down.discard(name)

    def _step_down(self, fault: Fault) -> str:
        if fault.kind == "step down meta":
            self._servers.system_call("META.LEADER.STEPDOWN")
            return "meta"
        stream, before = STREAMS[fault.target], self._target(fault)
        self._servers.call(f"STREAM.LEADER.STEPDOWN.{stream}")
        if not self._until_true(lambda: self._led_by_another(fault, before)):
            raise NothingDoneError(f"{before} leads {stream} again")
        return stream

    def _led_by_another(self, fault: Fault, before: str) -> bool:
        try:
            return self._target(fault) != before
        except (NothingDoneError, *_FAILED):
            return False  # the election is not over

    # -- between --------------------------------------------------------------------------------

    def _delete_consumer(self, fault: Fault) -> str:
        harm = Bereave(lambda subject: self._servers.call(subject))
        self._until(harm, 0)
        return harm.consumer

    def _reset(self, fault: Fault) -> str:
        served = self._served()
        for proxy in self._servers.proxies.values():
            proxy.cut()
        return f"{served}"

    def _served(self) -> int:
        """How many connections there are, which is at least one."""
        served = sum(proxy.served for proxy in self._servers.proxies.values())
        if not served:
            raise NothingDoneError("nobody is connected")
        return served

    def _drop(self, fault: Fault) -> str:
        drawn = random.Random(f"{self._seed} {fault.at}").randrange(2**32)
        harm: Harm = Share(fault.share, drawn)
        if fault.kind == "drop heartbeats":
            # A reader waits for a heartbeat when the last message has not come.
            harm = Status("Idle Heartbeat")
            self._until(harm, fault.seconds, Newest())
        else:
            self._until(harm, fault.seconds)
        return f"{harm.done}"

    def _until(self, harm: Harm, seconds: float, *more: Verdict) -> None:
        """Let ``harm`` work for some seconds, and longer where it has done nothing yet."""
        self._servers.harm(each(harm, *more))
        try:
            end = time.monotonic() + _PATIENCE
            self._over.wait(seconds)
            while not harm.done and time.monotonic() < end and not self._over.is_set():
                self._over.wait(0.1)
        finally:
            self._servers.harm(None)
        if not harm.done:
            raise NothingDoneError("none came by")

    def _hold(self, fault: Fault) -> str:
        proxies, served = list(self._servers.proxies.values()), self._served()
        for proxy in proxies:
            proxy.freeze()
        try:
            self._over.wait(fault.seconds)
        finally:
            for proxy in proxies:
                proxy.thaw()
        return f"{served}"

    # -- the driver -----------------------------------------------------------------------------

    def _end_driver(self, fault: Fault) -> str:
        began = time.monotonic()
        if fault.kind == "kill driver":
            self._driver.kill()
        else:
            self._driver.stop()
        try:
            self._over.wait(fault.seconds)
        finally:
            self._driver.start()
        # What is killed next shall have begun to read.
        self._until_true(self._driver.lively)
        return f"reads again after {time.monotonic() - began:.0f} s"


def _consumer(frame: bytes) -> tuple[str, str]:
    """The stream and the consumer of a delivery, by its ACK subject of 9 tokens."""
    tokens = frame.split(b"\r\n", 1)[0].split(b" $JS.ACK.", 1)[1].split(b".")
    return tokens[0].decode(), tokens[1].decode()
