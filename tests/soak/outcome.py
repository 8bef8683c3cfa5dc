"""Settings and outcome of a run: anomalies, and a summary in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Any

from tests.soak.collect import Events
from tests.soak.fault_injector import InjectedFault
from tests.soak.schedule import POWER_LOSS, Fault
from tests.soak.servers import STREAMS
from tests.soak.supervisor import Memory
from tests.support.oracle.evidence import Evidence, Findings, Rollback

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
        only: lanes of the schedule to run; all if empty.
    """

    seed: int
    minutes: float
    topology: str = "cluster"
    rate: float = 300.0
    spark: bool = True
    only: tuple[str, ...] = ()


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
