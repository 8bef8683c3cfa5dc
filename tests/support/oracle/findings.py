"""The output of the oracle: anomalies by kind, and excused differences. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

ANOMALIES = (
    "not read",
    "read twice",
    "out of order",
    "not written",
    "superseded",
    "replayed",
    "unequal",
    "server lost",
    "loss unnoticed",
)
_MAX_EXAMPLES = 20


@dataclass
class Findings:
    """Anomalies by kind, and excused differences.

    Attributes:
        counts: by kind, see :data:`ANOMALIES`.
        examples: the first findings of each kind, as text.
        excused: differences between writes and rows that are correct, by reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    excused: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, text: str) -> None:
        assert kind in ANOMALIES
        self.counts[kind] += 1
        if self.counts[kind] <= _MAX_EXAMPLES:
            self.examples.setdefault(kind, []).append(text)

    def merge(self, other: Findings) -> None:
        self.counts += other.counts
        self.excused += other.excused
        for kind, texts in other.examples.items():
            self.examples.setdefault(kind, []).extend(texts)
