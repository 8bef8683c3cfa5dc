"""A run of the soak: start all, inject the faults, recover, compare; its outcome in numbers."""

from __future__ import annotations

import contextlib
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
from statistics import median_high
from typing import Any

from tests.soak import collect, supervisor
from tests.soak.collect import Events
from tests.soak.fault_injector import POWER_LOSS, Fault, FaultInjector, InjectedFault, schedule
from tests.soak.servers import COPY, COPY_PREFIX, STREAMS, Servers, find_leaks
from tests.soak.sites import compare_sites
from tests.soak.supervisor import DriverSupervisor, Memory
from tests.support.nats.stored import stored_entries
from tests.support.oracle.evidence import Evidence, Findings, Rollback
from tests.support.oracle.row_oracle import compare_all, compare_copy

TOPOLOGIES = {
    "cluster": "three servers, all streams with three replicas",
    "single": "one server that syncs every write",
    "power-loss": "one server that restarts once with an older store: queries must stop",
}
"""Topologies and their descriptions."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run.

    Attributes:
        topology: see :data:`TOPOLOGIES`.
        spark: whether queries run in Spark, or without it (``tests.soak.driver_without_spark``).
    """

    seed: int
    minutes: float
    topology: str = "cluster"
    rate: float = 300.0
    spark: bool = True


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        memory: number of the driver, seconds after the start, memory of its processes.
        unfinished: a text if the last driver did not read all messages.
        leaks: consumers and connections on the servers after all queries had ended.
        harness_errors: errors of the run itself, which make its result invalid.
    """

    settings: Settings
    directory: Path
    planned: list[Fault] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    evidence: Evidence | None = None
    events: Events = field(default_factory=Events)
    injected: list[InjectedFault] = field(default_factory=list)
    rollback: Rollback | None = None
    acked: Counter[str] = field(default_factory=Counter)
    unsure: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    replayed_batches: int = 0
    rebuilds: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, float, Memory]] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    harness_errors: list[str] = field(default_factory=list)

    @property
    def anomalies(self) -> Counter[str]:
        """Number of anomalies by kind; empty for a run that passed."""
        others = Counter({kind: len(texts) for kind, texts in self._other_anomalies().items()})
        return +(self.findings.counts + others)

    @property
    def examples(self) -> dict[str, list[str]]:
        examples = {kind: list(texts) for kind, texts in self.findings.examples.items()}
        for kind, texts in self._other_anomalies().items():
            examples.setdefault(kind, []).extend(texts[:20])
        return {kind: texts for kind, texts in examples.items() if texts}

    def _other_anomalies(self) -> dict[str, list[str]]:
        """Anomalies that the oracle does not report."""
        return {
            "unexpected failure": self.events.unexpected,
            "loss unnoticed": self._unnoticed_losses(),
            "false loss": self._false_losses(),
            "stalled": self.events.stalls + self.unfinished,
            "left behind": self.leaks,
            "memory grew": memory_growth(self.memory),
            "harness": self.harness_errors + self._missing_power_loss(),
        }

    def _unnoticed_losses(self) -> list[str]:
        if self.rollback is None:
            return []
        running = sorted(STREAMS.keys() - self.events.lost.keys())
        return [f"{query} continued after the power loss" for query in running]

    def _false_losses(self) -> list[str]:
        """Queries that stopped for data loss although no data was lost before."""
        if self.rollback is None and self.findings.counts["server lost"]:
            return []
        return [
            f"{query}: {text}"
            for query, text in self.events.lost.items()
            if self.rollback is None or self.events.lost_at[query] < self.rollback.at
        ]

    def _missing_power_loss(self) -> list[str]:
        """An error if the scheduled power loss, the purpose of the run, did not happen."""
        if not any(fault.kind == POWER_LOSS for fault in self.planned):
            return []
        attempts = [one for one in self.injected if one.fault.kind == POWER_LOSS]
        if any(attempt.effective for attempt in attempts):
            return []
        return [
            f"no power loss: {attempts[-1].result if attempts else 'it was not reached in time'}"
        ]


def memory_growth(samples: list[tuple[int, float, Memory]]) -> list[str]:
    """Python processes of a driver whose memory grew, as text: its largest worker, and itself.

    For a driver that ran for three minutes or more, the medians of the second and the last quarter
    are compared; the first quarter is the warm-up.
    """
    grown = []
    for serial in sorted({sample[0] for sample in samples}):
        life = [(at, memory) for number, at, memory in samples if number == serial]
        if life[-1][0] - life[0][0] < 180:
            continue
        for name in ("worker", "driver"):
            sizes = [float(getattr(memory, name)) for _, memory in life]
            quarter = len(sizes) // 4
            early, late = median_high(sizes[quarter : 2 * quarter]), median_high(sizes[-quarter:])
            if late > 1.2 * early + 20:
                grown.append(
                    f"Python {name} of driver {serial} grew from {early:.0f} to {late:.0f} MiB"
                )
    return grown


def summary(outcome: Outcome) -> dict[str, Any]:
    """The outcome as numbers, for JSON."""
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
        "faults": Counter(one.fault.kind for one in outcome.injected if one.effective),
        "faults_not_done": Counter(one.fault.kind for one in outcome.injected if not one.effective),
        "driver_starts": outcome.events.starts,
        "query_failures": outcome.events.failures,
        "data_loss": {
            name: text.splitlines()[0][:200] for name, text in outcome.events.lost.items() if text
        },
        "rebuilds": outcome.rebuilds,
        "excused": outcome.findings.excused,
        "peak_mib": {
            name: round(max((getattr(one, name) for one in memories), default=0))
            for name in ("worker", "driver", "jvm")
        },
        "anomalies": outcome.anomalies,
        "examples": outcome.examples,
    }


_STOP_TIMEOUT = 180.0  # seconds for the generator to end
_POWER_LOSS_TIMEOUT = 900.0  # seconds after the end of the run to wait for the power loss
_SAMPLE_INTERVAL = 5.0

SYNC_ALWAYS = 'jetstream { sync_interval: "always" }\n'


def run(settings: Settings, log: Callable[[str], None]) -> Outcome:
    """Run a soak; all started processes are stopped, also on failure and Ctrl-C."""
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        return _run(settings, directory, log)
    except Exception:
        log(f"the run failed; its files are kept in {directory}")
        raise
    except BaseException:  # Ctrl-C or SIGTERM: the files are not needed
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _run(settings: Settings, directory: Path, log: Callable[[str], None]) -> Outcome:
    started = time.monotonic()
    outcome = Outcome(settings, directory)
    seconds = settings.minutes * 60
    planned = schedule(settings.seed, seconds, settings.topology, spark=settings.spark)
    outcome.planned = planned
    log(f"seed {settings.seed}, {len(planned)} faults; files in {directory}")
    for fault in planned:
        log(f"  {fault}")
    clustered = settings.topology == "cluster"
    replicas = 3 if clustered else 1
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(
            Servers(replicas, directory, "" if clustered else SYNC_ALWAYS)
        )
        module = "tests.soak.driver" if settings.spark else "tests.soak.driver_without_spark"
        driver = DriverSupervisor(directory, ",".join(servers.proxy_urls), module)
        stack.callback(driver.kill)
        driver.start()
        common = {"servers": servers.urls, "seed": settings.seed}
        sites = supervisor.start(
            "tests.soak.sites", directory, "sites", **common, replicas=replicas
        )
        stack.callback(supervisor.kill, sites)
        generator = supervisor.start(
            "tests.soak.generator", directory, "generator", **common, rate=settings.rate
        )
        stack.callback(supervisor.kill, generator)
        driver.wait_reading()
        _inject(outcome, servers, driver, generator, seconds, log)
        log("faults ended; stopping the generator, recovering the servers")
        _recover(servers)
        for name, writer in (("generator", generator), ("writer of sites", sites)):
            writer.send_signal(signal.SIGTERM)
            if (status := writer.wait(_STOP_TIMEOUT)) != 0:
                outcome.harness_errors.append(f"the {name} ended with status {status}")
        servers.wait_healthy()
        driver.stop()
        log("the queries read all messages")
        driver.finish()
        log("all messages read; waiting for consumers and connections to be removed")
        outcome.harness_errors += driver.harness_errors
        outcome.unfinished = driver.unfinished
        outcome.leaks = find_leaks(servers)
        log("comparing")
        _compare(outcome, servers, driver)
        log(f"took {time.monotonic() - started:.0f} s in total")
    return outcome


def clean(outcome: Outcome) -> None:
    shutil.rmtree(outcome.directory, ignore_errors=True)


def _inject(
    outcome: Outcome,
    servers: Servers,
    driver: DriverSupervisor,
    generator: subprocess.Popen[bytes],
    seconds: float,
    log: Callable[[str], None],
) -> None:
    over = threading.Event()
    began = time.monotonic()
    planned = outcome.planned
    injector = FaultInjector(servers, driver, generator, outcome.settings.seed, over, began)

    def lane(faults: list[Fault]) -> None:
        for fault in faults:
            if over.wait(max(0.0, began + fault.at - time.monotonic())):
                return
            try:
                injected = injector.inject(fault)
            except Exception as error:
                # A lane that ended silently would look like a run without faults.
                outcome.harness_errors.append(f"{fault}: {error!r}")
                continue
            outcome.injected.append(injected)
            mark = "" if injected.effective else "  NOT INJECTED"
            took = time.monotonic() - began - injected.at
            log(f"{injected.at:6.1f} s  {fault.kind} ({took:.1f} s): {injected.result}{mark}")

    lanes = [
        threading.Thread(target=lane, args=([f for f in planned if f.lane == name],), daemon=True)
        for name in sorted({fault.lane for fault in planned})
    ]
    for thread in lanes:
        thread.start()
    try:
        sample = began
        while _continues(outcome, began + seconds, lanes):
            over.wait(0.5)
            driver.restart_if_ended()
            if generator.poll() is not None:
                raise RuntimeError(f"the generator ended; see {outcome.directory}/generator.log")
            if (now := time.monotonic()) < sample:
                continue
            sample = now + _SAMPLE_INTERVAL
            if (memory := driver.memory()) is not None:
                outcome.memory.append((driver.serial, now - began, memory))
    finally:
        over.set()
        for thread in lanes:
            thread.join(180)
        outcome.rollback = injector.rollback


def _continues(outcome: Outcome, until: float, lanes: list[threading.Thread]) -> bool:
    """Whether faults are still injected; a scheduled power loss extends the run."""
    if (late := time.monotonic() - until) < 0:
        return True
    planned = sum(fault.kind == POWER_LOSS for fault in outcome.planned)
    done = sum(injected.fault.kind == POWER_LOSS for injected in outcome.injected)
    return late < _POWER_LOSS_TIMEOUT and done < planned and any(lane.is_alive() for lane in lanes)


def _recover(servers: Servers) -> None:
    servers.set_verdict(None)
    for name in list(servers.down):
        with contextlib.suppress(RuntimeError):  # it is running
            servers.start(name)
        servers.down.discard(name)


def _compare(outcome: Outcome, servers: Servers, driver: DriverSupervisor) -> None:
    outcome.events = driver.events()
    outcome.rebuilds = collect.rebuilds(driver.logs)
    evidence = collect.collect_evidence(
        servers.url, outcome.directory, outcome.events, outcome.rollback
    )
    outcome.evidence = evidence
    outcome.findings = compare_all(evidence)
    if outcome.settings.spark and evidence.rollback is None and "copy" not in evidence.stopped:
        copied = stored_entries(servers.url, COPY, COPY_PREFIX)
        outcome.findings.merge(compare_copy(evidence.messages["stream"], copied))
        outcome.rows["copy"] = len(copied)
    if evidence.rollback is None:
        found, outcome.rows["sites"] = compare_sites(servers.url, outcome.directory)
        outcome.findings.merge(found)
    for source, writes in evidence.writes.items():
        outcome.acked[source] = sum(write.seq is not None for write in writes)
        outcome.unsure[source] = len(writes) - outcome.acked[source]
    for source, attempts in evidence.attempts.items():
        outcome.rows[source] = len(evidence.rows(source))
        outcome.replayed_batches += sum(len(tries) > 1 for tries in attempts.values())
    rows = evidence.table if evidence.reconciled is None else evidence.reconciled
    outcome.rows["current"] = len(rows)
