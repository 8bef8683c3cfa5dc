"""The evidence of the oracle (writes, messages, rows, times of reads), and its findings. Pure.

Each bucket or stream is a *source*, and the query that reads it has the name of its source.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from tests.support.oracle.ledger import Write, number_of


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a sink, or a message of a stream.

    Attributes:
        seq: stream sequence, or revision.
        value: None for a marker.
        created: creation time of the stream, in any form that is equal for all rows of one stream.
        at: when the server stored the message; 0 for a row of a sink.
    """

    seq: int
    key: str
    operation: str
    value: bytes | None
    created: object = None
    at: float = 0.0


class MicroBatchRange(Protocol):
    """The range ``(start, end]`` of a committed micro-batch, and how it was read.

    Attributes:
        listed: whether the micro-batch read last values only.
        known: last sequence of the stream when the micro-batch was committed; 0 if unknown.
    """

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def listed(self) -> bool: ...
    @property
    def known(self) -> int: ...


@dataclass(frozen=True, slots=True)
class QueryProgress:
    """How far a query read, and when.

    Attributes:
        committed: last sequence of the last micro-batch that the query committed.
        reported_at: when its micro-batches were reported, in order. Each was planned after the
            report of the previous one, and read before its own report.
        completed: of its micro-batches in order, the last row's sequence and when the last complete
            attempt ended; for sinks with all messages.
        batches: the ranges of its micro-batches. With them, a write that its micro-batch could no
            longer find is excused (``supersession.py``).
    """

    committed: int = 0
    reported_at: tuple[float, ...] = ()
    completed: tuple[tuple[int, float], ...] = ()
    batches: tuple[MicroBatchRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Rollback:
    """A simulated power loss: the server restarted with an older store.

    Attributes:
        at: when it happened. Writers were paused from shortly before until the queries stopped.
        kept: by source, the last sequence that is certain to be in the older store.
    """

    at: float
    kept: dict[str, int]

    def may_remove(self, write: Write) -> bool:
        """Whether the rollback may have removed an acknowledged write."""
        assert write.seq is not None
        return write.seq > self.kept[write.source] and write.sent_at < self.at


@dataclass
class Evidence:
    """Everything that the oracle compares, by source.

    Attributes:
        writes: the ledger.
        attempts: of the sinks with all messages: by batch id, the rows of each complete attempt.
        messages: the streams' messages at the end. A source without an item was not read: its rows
            are compared with the ledger only.
        messages_read_at: when they were read.
        table: rows of the table of current values when its query had ended.
        reconciled: the same after ``reconcile``; None if it did not run.
        reconciled_at: when ``reconcile`` started.
        buckets: sources whose keys may be purged or expire.
        history: by source, how many revisions of a key the bucket keeps; -1 for any number.
        progress: of the queries.
        stopped: sources whose query stopped with DataLossError.
        rollback: the simulated power loss, if any.
        not_required: by source, sequences that need not be in the sink.
    """

    writes: dict[str, list[Write]]
    attempts: dict[str, dict[int, list[list[Entry]]]]
    messages: dict[str, list[Entry]] = field(default_factory=dict)
    messages_read_at: float = 0.0
    table: list[Entry] = field(default_factory=list)
    reconciled: list[Entry] | None = None
    reconciled_at: float = 0.0
    buckets: frozenset[str] = frozenset()
    history: dict[str, int] = field(default_factory=dict)
    progress: dict[str, QueryProgress] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    rollback: Rollback | None = None
    not_required: dict[str, frozenset[int]] = field(default_factory=dict)

    def rows(self, source: str) -> list[Entry]:
        """The rows of a sink: the last attempt of each micro-batch."""
        return [row for _, tries in sorted(self.attempts[source].items()) for row in tries[-1]]


def matches_write(write: Write, entry: Entry) -> bool:
    """Whether an entry has the key, operation and value of a write."""
    return (write.key, write.operation, write.value) == (entry.key, entry.operation, entry.value)


def same_entry(left: Entry, right: Entry) -> bool:
    return (left.seq, left.key, left.operation, left.value) == (
        right.seq,
        right.key,
        right.operation,
        right.value,
    )


def describe(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    if entry.value is None:
        return f"{entry.seq} {entry.operation} {entry.key}"
    number = number_of(entry.value)
    value = f"{entry.value[:20]!r}…" if number is None else f"value {number}"
    return f"{entry.seq} {entry.operation} {entry.key} {value}"


# -- findings --------------------------------------------------------------------------------------


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
