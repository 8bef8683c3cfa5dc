"""What the oracle compares, and what it finds. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from soak.ledger import PUT, Write, number_of, value_of

ANOMALIES = (
    "not read",
    "read twice",
    "out of order",
    "not written",
    "replayed",
    "unequal",
    "server lost",
    "loss unnoticed",
)
_EXAMPLES = 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a sink, or a message of a stream.

    Attributes:
        seq: stream sequence, or revision.
        value: None for a marker.
        created: the creation time of the stream, in whatever form; the same for all of one stream.
        at: when the server stored it; 0 for a row of a sink.
    """

    seq: int
    key: str
    operation: str
    value: bytes | None
    created: object = None
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a query came, and when.

    Attributes:
        through: the last sequence of the last micro-batch that it committed.
        reports: when its micro-batches were reported, in order. What each has read was planned
            after the one before it, and read before its own.
        spans: of its micro-batches in order, the last row's sequence and when the last attempt that
            reached its end was over; for sinks with every message.
    """

    through: int = 0
    reports: tuple[float, ...] = ()
    spans: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Loss:
    """A power loss that was made: the server came back with an older store.

    Attributes:
        at: when; nothing was written from a moment before until the queries had stopped.
        kept: by place, a sequence that the older store still had; what came after it may be gone.
    """

    at: float
    kept: dict[str, int]

    def takes(self, write: Write) -> bool:
        """Whether an acknowledged write may be gone with it."""
        assert write.seq is not None
        return write.seq > self.kept[write.place] and write.sent_at < self.at


@dataclass
class Evidence:
    """All that there is to judge, by place.

    Attributes:
        writes: the ledger.
        held: the streams' messages at the end.
        held_at: when they had been read.
        attempts: of the sinks with every message: by batch id, the rows of each whole attempt.
        table: the rows of the table of current values when the queries had ended.
        reconciled: the same after it was reconciled; None where it was not.
        reconciled_at: when that began.
        buckets: places whose keys may be purged, or expire.
        readings: of the queries.
        stopped: places whose query stopped with DataLossError.
        loss: what made them stop, where it was done on purpose.
    """

    writes: dict[str, list[Write]]
    held: dict[str, list[Entry]]
    held_at: float
    attempts: dict[str, dict[int, list[list[Entry]]]]
    table: list[Entry]
    reconciled: list[Entry] | None
    reconciled_at: float
    buckets: frozenset[str]
    readings: dict[str, Reading]
    stopped: set[str]
    loss: Loss | None = None

    def rows(self, place: str) -> list[Entry]:
        """The rows of a sink: of each micro-batch the last attempt."""
        return [row for _, tries in sorted(self.attempts[place].items()) for row in tries[-1]]


@dataclass
class Findings:
    """Anomalies by kind, and what was excused.

    Attributes:
        counts: by kind, see :data:`ANOMALIES`.
        examples: the first ones of each kind, in words.
        excused: what is not as it was written and need not be, by why.
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    excused: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, text: str) -> None:
        assert kind in ANOMALIES
        self.counts[kind] += 1
        if self.counts[kind] <= _EXAMPLES:
            self.examples.setdefault(kind, []).append(text)

    def merge(self, other: Findings) -> None:
        self.counts += other.counts
        self.excused += other.excused
        for kind, texts in other.examples.items():
            self.examples.setdefault(kind, []).extend(texts)


def same(write: Write, entry: Entry) -> bool:
    """Whether an entry is what was written."""
    value = value_of(write.number) if write.operation == PUT else None
    return (write.key, write.operation, value) == (entry.key, entry.operation, entry.value)


def equal(one: Entry, other: Entry) -> bool:
    """Whether two entries are the same one."""
    mine = (one.seq, one.key, one.operation, one.value)
    return mine == (other.seq, other.key, other.operation, other.value)


def said(entry: Entry | None) -> str:
    """An entry in words."""
    if entry is None:
        return "nothing"
    if entry.value is None:
        return f"{entry.seq} {entry.operation} {entry.key}"
    number = number_of(entry.value)
    what = f"{entry.value[:20]!r}…" if number is None else f"value {number}"
    return f"{entry.seq} {entry.operation} {entry.key} {what}"
