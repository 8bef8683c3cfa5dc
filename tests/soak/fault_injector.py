"""The schedule of faults, determined by the seed, and their injection.

Three lanes run concurrently, so that faults overlap: a server is paused while the driver is killed
and connections are reset. Within a lane faults run one after the other, and each kind occurs once
before any kind is repeated.

Each fault returns a description of its effect, or raises :class:`FaultNotInjectedError` if it found
nothing to affect (no consumer to delete, no delivery to drop): only effective faults count. After a
fault, every process that it stopped runs again.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.soak.servers import STREAMS, UNAVAILABLE, Servers
from tests.soak.supervisor import DriverSupervisor
from tests.support.oracle.evidence import Rollback
from tests.support.proxy.fault_proxy import Verdict, is_delivery, pending
from tests.support.proxy.verdicts import FrameFault, Share, Status, each

SOURCES = ("full", "current", "stream")

SERVER_KINDS = (
    "kill server",
    "kill leader",
    "pause server",
    "pause leader",
    "step down stream",
    "step down meta",
    "rolling restart",
    "kill all servers",
)
SINGLE_SERVER_KINDS = ("kill server", "pause server", "restart server")
BETWEEN_KINDS = (
    "delete a consumer",
    "reset connections",
    "drop deliveries",
    "drop heartbeats",
    "hold traffic",
    "delete a consumer",
)
DRIVER_KINDS = ("kill driver", "stop driver", "kill driver")

POWER_LOSS = "power loss"

_LONG = 900.0  # seconds; in such a run the last quarter is longer than the life of other drivers
_MARGIN = 8.0  # seconds without a new fault at the start and at the end


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at: seconds after the start, or later, when the previous fault of its lane has ended.
        lane: ``servers``, ``between`` or ``driver``.
        target: a source, whose stream is affected, or a server; empty if all are affected.
        seconds: its duration, or the time until a stopped process is restarted.
        share: the share of messages to drop.
    """

    at: float
    lane: str
    kind: str
    target: str = ""
    seconds: float = 0.0
    share: float = 0.0

    def __str__(self) -> str:
        text = f"{self.at:6.1f} s  {self.kind} {self.target}".rstrip()
        if self.seconds:
            text += f" for {self.seconds:.1f} s"
        return text + (f", {self.share:.1%}" if self.share else "")


class FaultNotInjectedError(Exception):
    """A fault found nothing to affect."""


def schedule(
    seed: int, seconds: float, topology: str = "cluster", *, spark: bool = True
) -> list[Fault]:
    """All faults of a run, in order of time."""
    lanes = {
        "servers": (SERVER_KINDS if topology == "cluster" else SINGLE_SERVER_KINDS, (8.0, 22.0)),
        "between": (BETWEEN_KINDS, (4.0, 12.0)),
        # Spark starts in a dozen seconds, and reads some micro-batches before it is stopped again.
        "driver": (DRIVER_KINDS, (35.0, 110.0) if spark else (4.0, 25.0)),
    }
    faults: list[Fault] = []
    for lane, (kinds, pauses) in lanes.items():
        chance = random.Random(f"{seed} {lane}")
        deck: list[str] = []
        at = _MARGIN + chance.uniform(0, pauses[0])
        until = seconds - _MARGIN
        if lane == "driver" and seconds >= _LONG:
            until = seconds * 0.75  # the last driver runs long enough to measure its memory growth
        if topology == "power-loss":
            until = seconds * 0.5  # the second half is for the power loss
        while at < until:
            if not deck:
                deck = list(kinds)
                chance.shuffle(deck)
            fault = _fault(chance, at, lane, deck.pop(), topology == "cluster")
            faults.append(fault)
            at += fault.seconds + chance.uniform(*pauses)
    if topology == "power-loss":
        faults.append(Fault(round(seconds * 0.5, 1), "servers", POWER_LOSS, "n1", 5.0))
    return sorted(faults, key=lambda fault: fault.at)


def _fault(chance: random.Random, at: float, lane: str, kind: str, clustered: bool) -> Fault:
    # The same draws for each kind, so that a change of one kind does not change later faults.
    server, source = chance.choice(("n1", "n2", "n3")), chance.choice(SOURCES)
    short, long, share = chance.uniform(0.5, 4), chance.uniform(3, 12), chance.uniform(0.002, 0.05)
    at = round(at, 1)
    if kind in ("kill server", "pause server"):
        return Fault(at, lane, kind, server if clustered else "n1", round(long, 1))
    if kind in ("kill leader", "pause leader"):
        return Fault(at, lane, kind, source, round(long, 1))
    if kind == "step down stream":
        return Fault(at, lane, kind, source)
    if kind == "drop heartbeats":
        return Fault(at, lane, kind, "", round(short, 1))
    if kind == "drop deliveries":
        return Fault(at, lane, kind, "", round(long, 1), round(share, 3))
    if kind in ("kill all servers", "hold traffic", "kill driver", "stop driver"):
        return Fault(at, lane, kind, "", round(short, 1))
    return Fault(at, lane, kind)


_QUERY_TIMEOUT = 300.0  # seconds for all queries to read, or to fail, including a driver start
_INJECT_TIMEOUT = 30.0  # seconds to find an object of the fault
_START_TIMEOUT = 120.0  # seconds to wait until a new driver reads


class DeleteConsumer(FrameFault):
    """Drops one delivery, and deletes the reader's consumer that sent it."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(False)
        self._servers = servers
        self._lock = threading.Lock()
        self.consumer = ""

    def hits(self, frame: bytes) -> bool:
        if not is_delivery(frame) or not self._lock.acquire(blocking=False):
            return False  # each proxy has its own thread
        try:
            # The ACK subject has 9 tokens.
            stream, consumer = frame.split(b" $JS.ACK.", 1)[1].decode("latin-1").split(".")[:2]
            if self.done or not consumer.startswith("spark-"):
                return False
            self._servers.call(f"CONSUMER.DELETE.{stream}.{consumer}")
        except UNAVAILABLE:
            return False  # no leader now; retry with a later delivery
        finally:
            self._lock.release()
        self.consumer = f"{consumer} of {stream}"
        return True


def _drop_last(frame: bytes) -> bool:
    """Drop deliveries after which their consumer has no pending message."""
    return not (is_delivery(frame) and pending(frame) == 0)


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """The result of a fault.

    Attributes:
        effective: whether the fault found something to affect.
    """

    fault: Fault
    at: float
    effective: bool
    result: str


class FaultInjector:
    """Injects faults; each lane calls :meth:`inject` from its own thread."""

    def __init__(
        self,
        servers: Servers,
        driver: DriverSupervisor,
        generator: subprocess.Popen[bytes],
        seed: int,
        stopped: threading.Event,
        started_at: float,
    ) -> None:
        self._servers = servers
        self._driver = driver
        self._generator = generator
        self._seed = seed
        self._stopped = stopped
        self._started_at = started_at
        self.rollback: Rollback | None = None
        self._kinds: dict[str, Callable[[Fault], str]] = {
            "kill server": self._kill,
            "kill leader": self._kill,
            "kill all servers": self._kill,
            "pause server": self._pause_server,
            "pause leader": self._pause_server,
            "restart server": self._restart_all,
            "rolling restart": self._restart_all,
            "step down stream": self._step_down,
            "step down meta": self._step_down,
            "delete a consumer": self._delete_consumer,
            "reset connections": self._reset,
            "drop deliveries": self._drop,
            "drop heartbeats": self._drop,
            "hold traffic": self._hold,
            POWER_LOSS: self._power_loss,
            "kill driver": self._stop_driver,
            "stop driver": self._stop_driver,
        }

    def inject(self, fault: Fault) -> InjectedFault:
        at = time.monotonic() - self._started_at
        try:
            result, effective = self._kinds[fault.kind](fault), True
        except FaultNotInjectedError as error:
            result, effective = str(error), False
        except UNAVAILABLE as error:
            result, effective = f"{type(error).__name__}: {error}"[:200], False
        return InjectedFault(fault, at, effective, result)

    # -- servers --------------------------------------------------------------------------------

    def _target(self, fault: Fault) -> str:
        servers = self._servers
        if fault.target in servers.servers:
            return fault.target
        stream = STREAMS[fault.target]
        leader = servers._report(stream).get("leader")
        if leader not in servers.servers:
            raise FaultNotInjectedError(f"{stream} has no leader")
        return str(leader)

    def _kill(self, fault: Fault) -> str:
        names = [self._target(fault)] if fault.target else list(self._servers.servers)
        with self._killed(*names):
            self._stopped.wait(fault.seconds)
        return " ".join(names)

    @contextlib.contextmanager
    def _killed(self, *names: str) -> Iterator[None]:
        servers = self._servers
        servers.down.update(names)
        try:
            for name in names:
                servers.servers[name].kill()
            yield
        finally:
            for name in names:
                servers.start(name)

    def _pause_server(self, fault: Fault) -> str:
        name = self._target(fault)
        servers = self._servers
        servers.down.add(name)
        servers.servers[name].pause()
        try:
            self._stopped.wait(fault.seconds)
        finally:
            servers.servers[name].resume()
            servers.down.discard(name)
        return name

    def _restart_all(self, fault: Fault) -> str:
        servers = self._servers
        for name, server in servers.servers.items():
            servers.down.add(name)
            try:
                server.terminate()
            finally:
                servers.start(name)
            servers.wait_healthy()
        return " ".join(servers.servers)

    def _power_loss(self, fault: Fault) -> str:
        """Restart the single server with its store of some seconds ago.

        All queries have read beyond that store before, and writers are paused until all queries
        have stopped: a stream that was rolled back, then grew past the checkpoint and superseded
        the message at the checkpoint, cannot be distinguished from one that was not
        (``rows.data_loss``).
        """
        ((name, server),) = self._servers.servers.items()
        older = server.store.with_name(f"{name}-older")
        with self._writers_paused():
            kept = self._last_sequences()
            with self._killed(name):
                shutil.copytree(server.store, older)
            self._servers.wait_healthy()
            # Greater than ``kept`` if the server wrote markers of expired entries.
            restarted_at = self._last_sequences()
        self._stopped.wait(fault.seconds)
        if not self._until_true(lambda: self._read_beyond(restarted_at), _QUERY_TIMEOUT):
            raise FaultNotInjectedError("not all queries have read beyond the copied store")
        with self._writers_paused():
            self.rollback = Rollback(time.time(), kept)
            with self._killed(name):
                shutil.rmtree(server.store)
                older.rename(server.store)
            self._servers.wait_healthy()
            stopped = self._until_true(
                # The query of sites stops too if the server was away during a read.
                lambda: restarted_at.keys() <= self._driver.events().lost.keys(),
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

    def _last_sequences(self) -> dict[str, int]:
        return {
            source: self._servers.call(f"STREAM.INFO.{stream}")["state"]["last_seq"]
            for source, stream in STREAMS.items()
        }

    def _read_beyond(self, sequences: dict[str, int]) -> bool:
        ends = self._driver.events().ends
        return all(ends.get(source, 0) > seq for source, seq in sequences.items())

    def _until_true(self, condition: Callable[[], bool], seconds: float = _START_TIMEOUT) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._stopped.wait(0.3):
            if condition():
                return True
        return False

    def _step_down(self, fault: Fault) -> str:
        if fault.kind == "step down meta":
            self._servers.system_call("META.LEADER.STEPDOWN")
            return "meta"
        stream, before = STREAMS[fault.target], self._target(fault)
        self._servers.call(f"STREAM.LEADER.STEPDOWN.{stream}")
        if not self._until_true(lambda: self._led_by_another(fault, before)):
            raise FaultNotInjectedError(f"{before} is the leader of {stream} again")
        return stream

    def _led_by_another(self, fault: Fault, before: str) -> bool:
        try:
            return self._target(fault) != before
        except (FaultNotInjectedError, *UNAVAILABLE):
            return False  # no new leader yet

    # -- connections ----------------------------------------------------------------------------

    def _delete_consumer(self, fault: Fault) -> str:
        deletion = DeleteConsumer(self._servers)
        self._apply(deletion, 0)
        return deletion.consumer

    def _reset(self, fault: Fault) -> str:
        served = self._connections()
        for proxy in self._servers.proxies.values():
            proxy.cut()
        return f"{served} connections"

    def _connections(self) -> int:
        """Number of connections through the proxies; raises if it is 0."""
        served = sum(proxy.served for proxy in self._servers.proxies.values())
        if not served:
            raise FaultNotInjectedError("no client is connected")
        return served

    def _drop(self, fault: Fault) -> str:
        seed = random.Random(f"{self._seed} {fault.at}").randrange(2**32)
        frame_fault: FrameFault = Share(fault.share, seed)
        if fault.kind == "drop heartbeats":
            # A reader needs a heartbeat if it has not received the last message.
            frame_fault = Status("Idle Heartbeat")
            self._apply(frame_fault, fault.seconds, _drop_last)
        else:
            self._apply(frame_fault, fault.seconds)
        return f"{frame_fault.done} dropped"

    def _apply(self, frame_fault: FrameFault, seconds: float, *others: Verdict) -> None:
        """Apply it to deliveries for some seconds, and longer until it has affected one."""
        self._servers.set_verdict(each(frame_fault, *others))
        try:
            end = time.monotonic() + _INJECT_TIMEOUT
            self._stopped.wait(seconds)
            while not frame_fault.done and time.monotonic() < end and not self._stopped.is_set():
                self._stopped.wait(0.1)
        finally:
            self._servers.set_verdict(None)
        if not frame_fault.done:
            raise FaultNotInjectedError("no matching delivery")

    def _hold(self, fault: Fault) -> str:
        proxies, served = list(self._servers.proxies.values()), self._connections()
        for proxy in proxies:
            proxy.freeze()
        try:
            self._stopped.wait(fault.seconds)
        finally:
            for proxy in proxies:
                proxy.thaw()
        return f"{served} connections"

    # -- the driver -----------------------------------------------------------------------------

    def _stop_driver(self, fault: Fault) -> str:
        stopped_at = time.monotonic()
        if fault.kind == "kill driver":
            self._driver.kill()
        else:
            self._driver.stop()
        try:
            self._stopped.wait(fault.seconds)
        finally:
            self._driver.start()
        # The next fault of the driver must affect queries that read.
        self._until_true(self._driver.is_reading)
        return f"reads again after {time.monotonic() - stopped_at:.0f} s"
