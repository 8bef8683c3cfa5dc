"""The evidence of the oracle (writes, messages, rows, times of reads), and its findings.

Each bucket or stream is a *source*, and the query that reads it has the name of its source.

The ledger of the writes is an append-only file with one line per event of a write. A write has at
most two lines: its ``sent`` line, and one of the others::

    sent <number> <source> <key> <operation> <ttl> <time>    before the message is sent
    ack <number> <sequence> <time>                           its PubAck was received
    unsure <number> <error>                                  no PubAck, or an error: stored or not

The times are of this machine, whose clock servers and queries share: a write was stored between its
two times. A write without a second line was in flight when the generator ended, and is unsure too.
The number of a PUT determines its value, so a row identifies its write and shows that it is whole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TextIO

PUT, DEL, PURGE = "PUT", "DEL", "PURGE"

_SIZES = (3, 17, 40, 40, 120, 120, 400, 3000)  # bytes; most are small, as in a bucket of states
_LARGE_EVERY, _LARGE = 997, 60_000


@dataclass(frozen=True, slots=True)
class Write:
    """One write.

    Attributes:
        number: unique in the run.
        source: the bucket or stream; in the soak ``full``, ``current`` or ``stream``.
        operation: ``PUT``, ``DEL`` or ``PURGE``; a message of a stream is a PUT.
        ttl: seconds after which the server removes it; 0 for never.
        seq: the sequence in the PubAck; None for an unsure write.
        sent_at, acked_at: when it was sent and its PubAck received; 0 without a PubAck.
        payload: value of a PUT that does not follow from its number.
    """

    number: int
    source: str
    key: str
    operation: str = PUT
    ttl: int = 0
    seq: int | None = None
    sent_at: float = 0.0
    acked_at: float = 0.0
    payload: bytes | None = None

    @property
    def value(self) -> bytes | None:
        """The value of a PUT; None for a marker."""
        if self.operation != PUT:
            return None
        return value_of(self.number) if self.payload is None else self.payload


def value_of(number: int) -> bytes:
    """The value of the PUT with this number."""
    size = _LARGE if number % _LARGE_EVERY == 0 else _SIZES[number % len(_SIZES)]
    start = b"%d:" % number
    return start + b"\r\nMSG abc" * (size // 9 + 1)  # resembles a protocol line


def number_of(value: bytes) -> int | None:
    """The number of the PUT with this value; None if no number has exactly this value."""
    digits, colon, _ = value[:24].partition(b":")
    if not colon or not digits.isdigit():
        return None
    number = int(digits)
    return number if value == value_of(number) else None


class WriteIndex:
    def __init__(self, writes: list[Write]) -> None:
        self.by_number = {write.number: write for write in writes}
        self._by_payload = {w.payload: w for w in writes if w.payload is not None}

    def find(self, value: bytes | None) -> Write | None:
        """The write with this value; None if no write has it, or for a marker."""
        if value is None:
            return None
        if (write := self._by_payload.get(value)) is not None:
            return write
        number = number_of(value)
        write = None if number is None else self.by_number.get(number)
        return write if write is not None and write.payload is None else None


class Ledger:
    """Appends to the ledger; used by the generator."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", buffering=1)  # line buffered

    def sent(self, write: Write) -> None:
        fields = (write.number, write.source, write.key, write.operation, write.ttl)
        self._append("sent", *fields, _now())

    def acked(self, number: int, seq: int) -> None:
        self._append("ack", number, seq, _now())

    def unsure(self, number: int, error: BaseException) -> None:
        """Record a write that may or may not be stored."""
        self._append("unsure", number, type(error).__name__)

    def close(self) -> None:
        self._file.close()

    def _append(self, *fields: object) -> None:
        self._file.write("\t".join(map(str, fields)) + "\n")


def read_ledger(path: Path) -> list[Write]:
    writes: dict[int, Write] = {}
    for kind, number, *rest in _lines(path):
        if kind == "sent":
            source, key, operation, ttl, at = rest
            writes[int(number)] = Write(
                int(number), source, key, operation, int(ttl), sent_at=float(at)
            )
        elif kind == "ack":
            seq, at = rest
            write = writes[int(number)]
            writes[int(number)] = replace(write, seq=int(seq), acked_at=float(at))
    return list(writes.values())


def _now() -> str:
    return f"{time.time():.3f}"


def _lines(path: Path) -> Iterator[list[str]]:
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):  # the last line may be incomplete
                yield line[:-1].split("\t")


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
            longer find is excused (``expiry.py``).
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
