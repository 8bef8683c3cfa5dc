"""One run: start all parties, do what the schedule says, let all come to rest, compare."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak import collect, processes
from soak.collect import Events
from soak.oracle import Evidence, Findings, judge
from soak.processes import Memory
from soak.schedule import POWER_LOSS, Fault, schedule
from soak.servers import STREAMS, Servers
from soak.worst import Done, Worst

_START = 300.0  # seconds for Spark, on a loaded machine
_STOP = 180.0  # seconds for a graceful stop, on a loaded machine
_FINISH = 900.0
_SAMPLE_EVERY = 5.0

TOPOLOGIES = {
    "cluster": "three servers, three replicas of everything",
    "single": "one server that syncs every write",
    "power-loss": "one server that once comes back with an older store: queries must stop",
}

SYNC_ALWAYS = 'jetstream { sync_interval: "always" }\n'


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is made of.

    Attributes:
        minutes: for how long faults are done; recovery and comparison come after.
        topology: see :data:`TOPOLOGIES`.
        rate: writes a second, in the steady phase.
        spark: queries in Spark, or without it (``soak.plain``).
        only: the lanes of the schedule whose faults are done; all when empty.
    """

    seed: int
    minutes: float
    topology: str = "cluster"
    rate: float = 300.0
    spark: bool = True
    only: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What a run came to; see the fields' names."""

    settings: Settings
    directory: Path
    findings: Findings = field(default_factory=Findings)
    evidence: Evidence | None = None
    events: Events = field(default_factory=Events)
    done: list[Done] = field(default_factory=list)
    acked: Counter[str] = field(default_factory=Counter)
    unsure: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    replayed_batches: int = 0
    rebuilds: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, float, Memory]] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def anomalies(self) -> Counter[str]:
        """By kind; empty for a run that passed."""
        found = Counter(self.findings.counts)
        if self.events.unexpected:
            found["unexpected failure"] = len(self.events.unexpected)
        if any(one.fault.kind == POWER_LOSS and one.happened for one in self.done):
            # Acknowledged writes are gone, as was to be; every query must have said so.
            found["server lost"] = 0
            found["loss unnoticed"] += len(STREAMS.keys() - self.events.lost.keys())
        elif self.events.lost and not self.findings.counts["server lost"]:
            found["false loss"] = len(self.events.lost)
        if self.troubles:
            found["harness"] = len(self.troubles)
        if (text := growth(self.memory)) is not None:
            found["memory grew"] = 1
            self.findings.examples["memory grew"] = [text]
        return +found


class Driver:
    """The Spark driver: one process after the other, on the same checkpoints."""

    def __init__(self, directory: Path, servers: str, module: str) -> None:
        self._module = module
        self._directory = directory
        self._servers = servers
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.serial = 0
        self.troubles: list[str] = []

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
        """Let it read to the end; the driver must not run."""
        self.start(finish=True)
        with self._lock:
            process, self._process = self._process, None
            assert process is not None
            self._await(process, _FINISH)

    def _await(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        try:
            if (status := process.wait(seconds)) != 0:
                self.troubles.append(f"driver {self.serial} ended with status {status}")
        except subprocess.TimeoutExpired:
            self.troubles.append(f"driver {self.serial} did not end within {seconds:g} s")
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


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Run a soak; everything that was started is ended, also on failure and Ctrl-C.

    Args:
        say: for a line of what happens.

    Returns:
        The outcome. Its directory still exists: see :func:`clean`.
    """
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        return _run(settings, directory, say)
    except Exception:
        say(f"the run failed; everything is kept in {directory}")
        raise
    except BaseException:  # Ctrl-C, or told to end: nobody looks at what there is
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _run(settings: Settings, directory: Path, say: Callable[[str], None]) -> Outcome:
    started = time.monotonic()
    outcome = Outcome(settings, directory)
    seconds = settings.minutes * 60
    planned = [
        fault
        for fault in schedule(settings.seed, seconds, settings.topology, spark=settings.spark)
        if not settings.only or fault.lane in settings.only
    ]
    say(f"seed {settings.seed}, {len(planned)} faults; all that there is lies in {directory}")
    for fault in planned:
        say(f"  {fault}")
    clustered = settings.topology == "cluster"
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(
            Servers(3 if clustered else 1, directory, "" if clustered else SYNC_ALWAYS)
        )
        module = "soak.driver" if settings.spark else "soak.plain"
        driver = Driver(directory, ",".join(servers.proxied), module)
        stack.callback(driver.kill)
        ledger = directory / "ledger.tsv"
        request = directory / "generator.json"
        request.write_text(
            json.dumps(
                {
                    "servers": servers.addresses,
                    "ledger": str(ledger),
                    "seed": settings.seed,
                    "rate": settings.rate,
                }
            )
        )
        driver.start()
        generator = processes.start("soak.generator", request, directory / "generator.log")
        stack.callback(processes.kill, generator)
        driver.wait_lively()
        _trouble(outcome, servers, driver, generator, planned, seconds, say)
        say("the faults are over; the writer stops, the servers recover")
        _heal(servers)
        generator.send_signal(signal.SIGTERM)
        if (status := generator.wait(_STOP)) != 0:
            outcome.troubles.append(f"the generator ended with status {status}")
        servers.wait_healthy()
        driver.stop()
        say("the queries read to the end")
        driver.finish()
        say("all is read; comparing")
        outcome.troubles += driver.troubles
        _compare(outcome, servers, driver)
        say(f"took {time.monotonic() - started:.0f} s in all")
    return outcome


def clean(outcome: Outcome) -> None:
    """Remove the run's directory."""
    shutil.rmtree(outcome.directory, ignore_errors=True)


def _trouble(
    outcome: Outcome,
    servers: Servers,
    driver: Driver,
    generator: subprocess.Popen[bytes],
    planned: list[Fault],
    seconds: float,
    say: Callable[[str], None],
) -> None:
    over = threading.Event()
    began = time.monotonic()
    worst = Worst(servers, driver, generator, outcome.settings.seed, over, began)

    def lane(faults: list[Fault]) -> None:
        for fault in faults:
            if over.wait(max(0.0, began + fault.at - time.monotonic())):
                return
            try:
                done = worst.do(fault)
            except Exception as error:  # a lane that ends unseen would look like a calm run
                outcome.troubles.append(f"{fault}: {error!r}")
                continue
            outcome.done.append(done)
            mark = "" if done.happened else "  NOT DONE"
            took = time.monotonic() - began - done.at
            say(f"{done.at:6.1f} s  {fault.kind} ({took:.1f} s): {done.said}{mark}")

    lanes = [
        threading.Thread(target=lane, args=([f for f in planned if f.lane == name],), daemon=True)
        for name in sorted({fault.lane for fault in planned})
    ]
    for thread in lanes:
        thread.start()
    try:
        sample = began
        while time.monotonic() < began + seconds:
            over.wait(0.5)
            driver.look()
            if generator.poll() is not None:
                raise RuntimeError(f"the generator ended: {outcome.directory}/generator.log")
            if time.monotonic() >= sample and (memory := driver.memory()) is not None:
                sample += _SAMPLE_EVERY
                outcome.memory.append((driver.serial, time.monotonic() - began, memory))
    finally:
        over.set()
        for thread in lanes:
            thread.join(180)


def _heal(servers: Servers) -> None:
    servers.harm(None)
    for name in list(servers.down):
        with contextlib.suppress(RuntimeError):  # it runs
            servers.servers[name].start()
        servers.down.discard(name)


def _compare(outcome: Outcome, servers: Servers, driver: Driver) -> None:
    outcome.events = driver.events()
    outcome.rebuilds = collect.rebuilds(driver.logs)
    evidence = collect.gather(servers.url, outcome.directory, outcome.events)
    outcome.evidence = evidence
    outcome.findings = judge(evidence)
    for place, writes in evidence.writes.items():
        outcome.acked[place] = sum(write.seq is not None for write in writes)
        outcome.unsure[place] = len(writes) - outcome.acked[place]
    for place, attempts in evidence.attempts.items():
        outcome.rows[place] = len(evidence.rows(place))
        outcome.replayed_batches += sum(len(tries) > 1 for tries in attempts.values())
    outcome.rows["current"] = len(evidence.tables[0])


def growth(samples: list[tuple[int, float, Memory]]) -> str | None:
    """Whether the largest Python worker of a driver grew; what is said of it, or None.

    Of a driver that lived for three minutes or more, the medians of the second and the last quarter
    of its life are compared; the first quarter is its warming up.
    """
    for serial in {one[0] for one in samples}:
        life = [(at, memory.worker) for number, at, memory in samples if number == serial]
        if life[-1][0] - life[0][0] < 180:
            continue
        quarter = len(life) // 4
        early = _median([worker for _, worker in life[quarter : 2 * quarter]])
        late = _median([worker for _, worker in life[-quarter:]])
        if late > 1.2 * early + 20:
            return f"a Python worker of driver {serial} grew from {early:.0f} to {late:.0f} MiB"
    return None


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _loss(text: str) -> str:
    return text[text.find(collect.LOSS) :].split("\n")[0][:200]


def summary(outcome: Outcome) -> dict[str, Any]:
    """The run in numbers, for JSON."""
    anomalies = outcome.anomalies
    examples = {
        **outcome.findings.examples,
        "unexpected failure": outcome.events.unexpected[:5],
        "harness": outcome.troubles,
    }
    memories = [memory for _, _, memory in outcome.memory]
    return {
        "seed": outcome.settings.seed,
        "minutes": outcome.settings.minutes,
        "topology": outcome.settings.topology,
        "queries": "Spark" if outcome.settings.spark else "without Spark",
        "writes": {"acknowledged": outcome.acked, "unsure": outcome.unsure},
        "rows": outcome.rows,
        "micro_batches": outcome.events.batches,
        "micro_batches_run_again": outcome.replayed_batches,
        "faults": Counter(done.fault.kind for done in outcome.done if done.happened),
        "faults_not_done": Counter(done.fault.kind for done in outcome.done if not done.happened),
        "driver_starts": outcome.events.starts,
        "query_failures": outcome.events.failures,
        "data_loss": {
            name: text.splitlines()[0][:200] for name, text in outcome.events.lost.items()
        },
        "rebuilds": outcome.rebuilds,
        "excused": outcome.findings.excused,
        "peak_mib": {
            "python_worker": round(max((m.worker for m in memories), default=0)),
            "python_driver": round(max((m.driver for m in memories), default=0)),
            "jvm": round(max((m.jvm for m in memories), default=0)),
        },
        "anomalies": anomalies,
        "examples": {kind: texts for kind, texts in examples.items() if anomalies[kind]},
    }
