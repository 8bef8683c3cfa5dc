"""What a run was made of, and what it came to: anomalies, and a summary in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak.collect import Events
from soak.findings import Evidence, Findings, Loss
from soak.processes import Memory
from soak.schedule import POWER_LOSS, Fault
from soak.servers import STREAMS
from soak.worst import Done

TOPOLOGIES = {
    "cluster": "three servers, three replicas of everything",
    "single": "one server that syncs every write",
    "power-loss": "one server that once comes back with an older store: queries must stop",
}
"""What there is to choose, and what it is."""


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
    """What a run came to; see the fields' names.

    Attributes:
        planned, done: the faults that were due, and what became of them.
        loss: the power loss that was done.
        memory: the number of the driver, seconds after the start, what its processes took.
        stalled: queries that hung, in words.
        left: what was left on the servers when all queries had ended.
        troubles: what went wrong with the run itself, which therefore proves nothing.
    """

    settings: Settings
    directory: Path
    planned: list[Fault] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    evidence: Evidence | None = None
    events: Events = field(default_factory=Events)
    done: list[Done] = field(default_factory=list)
    loss: Loss | None = None
    acked: Counter[str] = field(default_factory=Counter)
    unsure: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    replayed_batches: int = 0
    rebuilds: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, float, Memory]] = field(default_factory=list)
    stalled: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def anomalies(self) -> Counter[str]:
        """By kind; empty for a run that passed."""
        others = Counter({kind: len(texts) for kind, texts in self._others().items()})
        return +(self.findings.counts + others)

    @property
    def examples(self) -> dict[str, list[str]]:
        """Of each kind of anomaly the first ones, in words."""
        found = {kind: list(texts) for kind, texts in self.findings.examples.items()}
        for kind, texts in self._others().items():
            found.setdefault(kind, []).extend(texts[:20])
        return {kind: texts for kind, texts in found.items() if texts}

    def _others(self) -> dict[str, list[str]]:
        """The anomalies that the oracle does not see."""
        return {
            "unexpected failure": self.events.unexpected,
            "loss unnoticed": self._unnoticed(),
            "false loss": self._false_losses(),
            "stalled": self.stalled,
            "left behind": self.left,
            "memory grew": growth(self.memory),
            "harness": self.troubles + self._undone(),
        }

    def _unnoticed(self) -> list[str]:
        if self.loss is None:
            return []
        on = sorted(STREAMS.keys() - self.events.lost.keys())
        return [f"{query} went on after the power loss" for query in on]

    def _false_losses(self) -> list[str]:
        """Queries that stopped for a data loss where nothing was lost, or not yet."""
        if self.loss is None and self.findings.counts["server lost"]:
            return []
        return [
            f"{query}: {text}"
            for query, text in self.events.lost.items()
            if self.loss is None or self.events.lost_at[query] < self.loss.at
        ]

    def _undone(self) -> list[str]:
        """Without the power loss, a run that is about it proves nothing; others are one of many."""
        if not any(fault.kind == POWER_LOSS for fault in self.planned):
            return []
        tried = [one for one in self.done if one.fault.kind == POWER_LOSS]
        if any(one.happened for one in tried):
            return []
        return [f"no power loss: {tried[-1].said if tried else 'its turn never came'}"]


def growth(samples: list[tuple[int, float, Memory]]) -> list[str]:
    """Which Python processes of a driver grew, in words: the largest worker, and its own.

    Of a driver that lived for three minutes or more, the medians of the second and the last quarter
    of its life are compared; the first quarter is its warming up.
    """
    found = []
    for serial in sorted({one[0] for one in samples}):
        life = [(at, memory) for number, at, memory in samples if number == serial]
        if life[-1][0] - life[0][0] < 180:
            continue
        for name, sizes in (
            ("a Python worker", [memory.worker for _, memory in life]),
            ("the Python process", [memory.driver for _, memory in life]),
        ):
            quarter = len(sizes) // 4
            early, late = _median(sizes[quarter : 2 * quarter]), _median(sizes[-quarter:])
            if late > 1.2 * early + 20:
                found.append(f"{name} of driver {serial} grew from {early:.0f} to {late:.0f} MiB")
    return found


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def summary(outcome: Outcome) -> dict[str, Any]:
    """The run in numbers, for JSON."""
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
            name: text.splitlines()[0][:200] for name, text in outcome.events.lost.items() if text
        },
        "rebuilds": outcome.rebuilds,
        "excused": outcome.findings.excused,
        "peak_mib": {
            "python_worker": round(max((m.worker for m in memories), default=0)),
            "python_driver": round(max((m.driver for m in memories), default=0)),
            "jvm": round(max((m.jvm for m in memories), default=0)),
        },
        "anomalies": outcome.anomalies,
        "examples": outcome.examples,
    }
