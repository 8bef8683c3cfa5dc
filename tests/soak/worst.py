"""What the schedule says, done to servers, connections and the driver.

Each fault says what it did, and :class:`NothingDoneError` when there was nothing to do it to (no
consumer to delete, no delivery to drop): a fault counts only if it happened. Afterwards everything
that it ended runs again.
"""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from faults.harm import Harm, Share, Status, each
from faults.proxy import Verdict

from nats_stream_source.embedded import NatsServer
from soak.collect import Events
from soak.findings import Loss
from soak.power import PowerLoss
from soak.schedule import POWER_LOSS, Fault, NothingDoneError
from soak.servers import NO_ANSWER, STREAMS, Servers
from soak.verdicts import Bereave, Newest

_PATIENCE = 30.0  # seconds to find something to do it to
_START = 120.0  # seconds in which a new driver reads; more is not waited for


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
    """Does faults; each lane calls :meth:`do` from a thread of its own.

    Attributes:
        loss: the power loss that was done.
    """

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
        self.loss: Loss | None = None
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
        except NothingDoneError as error:
            said, happened = str(error), False
        except NO_ANSWER as error:
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
            self._servers.start(name)
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
                self._servers.start(name)
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
            self._servers.start(name)

    def _power_loss(self, fault: Fault) -> str:
        power = PowerLoss(self._servers, self._driver.events, self._generator, self._until_true)
        try:
            return power.do(lambda: self._over.wait(fault.seconds))
        finally:
            self.loss = power.loss

    def _until_true(self, condition: Callable[[], bool], seconds: float = _START) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._over.wait(0.3):
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
            raise NothingDoneError(f"{before} leads {stream} again")
        return stream

    def _led_by_another(self, fault: Fault, before: str) -> bool:
        try:
            return self._target(fault) != before
        except (NothingDoneError, *NO_ANSWER):
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
        return f"{served} connections"

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
        return f"{harm.done} dropped"

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
            raise NothingDoneError("nothing came by to harm")

    def _hold(self, fault: Fault) -> str:
        proxies, served = list(self._servers.proxies.values()), self._served()
        for proxy in proxies:
            proxy.freeze()
        try:
            self._over.wait(fault.seconds)
        finally:
            for proxy in proxies:
                proxy.thaw()
        return f"{served} connections"

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
