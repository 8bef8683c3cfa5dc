"""The oracle: does what the queries delivered agree with what was written? Pure.

It knows three things of a bucket or stream: the ledger, the messages that the servers hold at the
end (read with another client), and the rows in the sink, in their order. It says:

================  ==========================================================================
``not read``      acknowledged, or held by the stream at the end, and in no row
``read twice``    in more than one row
``out of order``  a row after one with a greater sequence (so of a key's rows, too)
``not written``   a row that nobody wrote: another value, key, operation or sequence
``replayed``      a micro-batch that ran again had other rows
``unequal``       the Delta table and the bucket differ in a key
``server lost``   acknowledged, and the servers do not have it (see below)
================  ==========================================================================

Some acknowledged writes may go unread, since the server removes them by itself: what a later PURGE
of the key rolled up, and what had a TTL. Only keys that begin with ``purge.`` are purged and only
keys that begin with ``ttl.`` have a TTL, so that all others are held to the full promise. A
server's own marker, where an entry expired, is a row that nobody wrote, of a ``ttl.`` key; where
that marker is gone too, or still to come, the table has the expired row. An unsure write may be
there or not, but at most as often as the stream has it.

``server lost``: the source is not to blame; but if rows had been delivered that are gone, the query
must have noticed (DataLossError), else ``loss unnoticed`` is an anomaly of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from soak.ledger import PURGE, PUT, Write, number_of, value_of

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
    """

    seq: int
    key: str
    operation: str
    value: bytes | None
    created: object = None


@dataclass
class Findings:
    """Anomalies by kind, and what was excused.

    Attributes:
        counts: by kind, see :data:`ANOMALIES`.
        examples: the first ones of each kind, in words.
        excused: acknowledged writes that the server removed before they were read, by why.
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


@dataclass
class Evidence:
    """All that there is to judge, by place.

    Attributes:
        writes: the ledger.
        held: the streams' messages at the end.
        attempts: of the sinks with every message: by batch id, the rows of each whole attempt.
        tables: what the table of current values held: at the end, and before it was reconciled.
        buckets: places whose keys may be purged, or expire.
        stopped: places whose query stopped with DataLossError.
    """

    writes: dict[str, list[Write]]
    held: dict[str, list[Entry]]
    attempts: dict[str, dict[int, list[list[Entry]]]]
    tables: list[list[Entry]]
    buckets: frozenset[str]
    stopped: set[str]

    def rows(self, place: str) -> list[Entry]:
        """The rows of a sink: of each micro-batch the last attempt."""
        return [row for _, tries in sorted(self.attempts[place].items()) for row in tries[-1]]


def judge(evidence: Evidence) -> Findings:
    """Compare everything."""
    findings = Findings()
    for place, attempts in evidence.attempts.items():
        findings.merge(judge_replays(place, attempts, compacts=place in evidence.buckets))
        findings.merge(
            judge_rows(
                place,
                evidence.writes[place],
                evidence.rows(place),
                evidence.held[place],
                stopped=place in evidence.stopped,
            )
        )
    for table in evidence.tables:
        findings.merge(
            judge_table(
                "current",
                evidence.writes["current"],
                table,
                evidence.held["current"],
                stopped="current" in evidence.stopped,
            )
        )
    return findings


def judge_rows(
    place: str,
    writes: Iterable[Write],
    rows: Iterable[Entry],
    held: Iterable[Entry],
    *,
    stopped: bool = False,
) -> Findings:
    """Compare a sink that has every message with the ledger and the stream.

    Args:
        rows: in the order of the sink.
        held: the stream's messages at the end.
        stopped: whether the query stopped with DataLossError. What came later is not expected then.
    """
    return _Rows(place, list(writes), list(held), stopped).judge(list(rows))


class _Rows:
    def __init__(
        self,
        place: str,
        writes: list[Write],
        held: list[Entry],
        stopped: bool,
    ) -> None:
        self.findings = Findings()
        self.place = place
        self.stopped = stopped
        self.held = {entry.seq: entry for entry in held}
        self.by_number = {write.number: write for write in writes}
        self.acked: dict[int, list[Write]] = {}
        self.unsure_markers: Counter[tuple[str, str]] = Counter()
        self.purged: dict[str, int] = {}
        for write in writes:
            if write.seq is not None:
                self.acked.setdefault(write.seq, []).append(write)
            elif write.operation != PUT:
                self.unsure_markers[write.key, write.operation] += 1

    def judge(self, rows: list[Entry]) -> Findings:
        for entry in [*rows, *self.held.values()]:
            if entry.operation == PURGE:
                self.purged[entry.key] = max(self.purged.get(entry.key, 0), entry.seq)
        for seq, writes in self.acked.items():
            for write in writes:
                if write.operation == PURGE:
                    self.purged[write.key] = max(self.purged.get(write.key, 0), seq)
        read = self._rows(rows)
        self._unread(read)
        return self.findings

    def _add(self, kind: str, text: str) -> None:
        self.findings.add(kind, f"{self.place}: {text}")

    def _rows(self, rows: list[Entry]) -> dict[int, Entry]:
        seen: set[tuple[object, int]] = set()
        read: dict[int, Entry] = {}
        greatest = 0
        if len({row.created for row in rows}) > 1:
            self._add("not written", "rows of two streams, and there is one")
        for row in rows:
            if (row.created, row.seq) in seen:
                self._add("read twice", said(row))
                continue
            seen.add((row.created, row.seq))
            read[row.seq] = row
            if row.seq < greatest:
                self._add("out of order", f"{said(row)} after {greatest}")
            greatest = max(greatest, row.seq)
            if (why := self._strange(row)) is not None:
                self._add("not written", f"{said(row)}: {why}")
        return read

    def _strange(self, row: Entry) -> str | None:
        """What is wrong with a row; None when somebody wrote it."""
        acked = self.acked.get(row.seq, [])
        if any(_same(write, row) for write in acked):
            return None
        held = self.held.get(row.seq)
        if held is not None and not _equal(held, row) and not self.stopped:
            return f"the stream has {said(held)} there"
        if row.operation == PUT:
            number = None if row.value is None else number_of(row.value)
            write = None if number is None else self.by_number.get(number)
            if write is None:
                return "nobody's value"
            if (write.key, write.operation) != (row.key, PUT):
                return f"{number} was written to {write.key}"
            if write.seq is not None and write.seq != row.seq and held is None:
                return f"{number} was acknowledged as {write.seq}"
            return None
        if row.key.startswith("ttl.") and row.operation == PURGE:
            return None  # the server's marker
        if self.unsure_markers[row.key, row.operation] > 0:
            self.unsure_markers[row.key, row.operation] -= 1
            return None
        return "nobody wrote this marker" + (f"; {acked[0]} was acknowledged" if acked else "")

    def _unread(self, read: Mapping[int, Entry]) -> None:
        last = max(read, default=0)
        for seq, entry in self.held.items():
            # Entries go on expiring after all was read.
            marker = entry.key.startswith("ttl.") and entry.operation == PURGE
            # After a loss, what is held may have come in the place of what was lost.
            if seq not in read and not self.stopped and not (seq > last and marker):
                self._add("not read", f"{said(entry)}, which the stream holds")
        gone_after_read = 0
        for seq, writes in self.acked.items():
            for write in writes:
                row, held = read.get(seq), self.held.get(seq)
                was_read = row is not None and _same(write, row)
                if held is not None and _same(write, held):
                    if row is not None and not was_read and not self.stopped:
                        self._add("not read", f"{write}: {said(row)} came in its place")
                    continue
                why = self._removed(write)
                if why is None:
                    self._add("server lost", f"{write}{', which had been read' * was_read}")
                    gone_after_read += was_read
                elif not was_read:
                    self.findings.excused[why] += 1
        if gone_after_read and not self.stopped:
            self._add("loss unnoticed", f"{gone_after_read} rows are gone that had been read")

    def _removed(self, write: Write) -> str | None:
        """Why the server may have removed an acknowledged write by itself."""
        assert write.seq is not None
        if self.purged.get(write.key, 0) > write.seq and write.key.startswith("purge."):
            return "purged"
        if write.key.startswith("ttl."):
            return "TTL"
        return None


def judge_replays(
    place: str, attempts: Mapping[int, Sequence[Sequence[Entry]]], *, compacts: bool
) -> Findings:
    """Compare the attempts of each micro-batch: a range read again has the same rows.

    Args:
        attempts: by batch id, the rows of each attempt that reached its end.
        compacts: whether ``purge.`` and ``ttl.`` keys may lose entries between two attempts.
    """
    findings = Findings()
    for batch, tries in attempts.items():
        rows = [
            [r for r in one if not (compacts and r.key.startswith(("purge.", "ttl.")))]
            for one in tries
        ]
        for one in rows[1:]:
            if one != rows[0]:
                findings.add(
                    "replayed",
                    f"{place}: micro-batch {batch} had {_span(rows[0])}, then {_span(one)}",
                )
    return findings


def judge_table(
    place: str,
    writes: Iterable[Write],
    table: Iterable[Entry],
    held: Iterable[Entry],
    *,
    stopped: bool = False,
) -> Findings:
    """Compare the Delta table with the bucket, and the bucket with the ledger.

    Args:
        table: its rows, one a key.
        held: the messages of the bucket's stream at the end.
        stopped: whether the query stopped with DataLossError; the table is not compared then.
    """
    findings = Findings()
    last: dict[str, Entry] = {}
    for entry in sorted(held, key=lambda one: one.seq):
        last[entry.key] = entry
    rows: dict[str, Entry] = {}
    for row in table:
        if row.key in rows:
            findings.add("read twice", f"{place}: two rows of {row.key}")
        rows[row.key] = row
    live = {key: entry for key, entry in last.items() if entry.operation == PUT}
    by_number = {write.number: write for write in writes}
    if not stopped:
        for key in sorted(rows.keys() | live.keys()):
            mine, theirs = rows.get(key), live.get(key)
            if mine is not None and theirs is None and key.startswith("ttl."):
                findings.excused["expired"] += 1  # its marker may be gone too, or still to come
            elif mine is None or theirs is None or not _equal(mine, theirs):
                table_has, bucket_has = (
                    said(one) if one else "nothing" for one in (mine, theirs or last.get(key))
                )
                findings.add("unequal", f"{place} {key}: table {table_has}, bucket {bucket_has}")
    for row in rows.values():
        number = None if row.value is None else number_of(row.value)
        written = by_number.get(number) if number is not None else None
        if written is None or written.key != row.key:
            findings.add("not written", f"{place}: {said(row)}")
    for write in by_number.values():
        if write.seq is None or write.key.startswith("ttl."):
            continue
        newest = last.get(write.key)
        if newest is None or newest.seq < write.seq:
            findings.add("server lost", f"{place}: {write}")
    return findings


def said(entry: Entry) -> str:
    """An entry in words."""
    if entry.value is None:
        return f"{entry.seq} {entry.operation} {entry.key}"
    number = number_of(entry.value)
    what = f"{entry.value[:20]!r}…" if number is None else f"value {number}"
    return f"{entry.seq} {entry.operation} {entry.key} {what}"


def _same(write: Write, entry: Entry) -> bool:
    value = value_of(write.number) if write.operation == PUT else None
    return (write.key, write.operation, value) == (entry.key, entry.operation, entry.value)


def _equal(one: Entry, other: Entry) -> bool:
    mine = (one.seq, one.key, one.operation, one.value)
    return mine == (other.seq, other.key, other.operation, other.value)


def _span(rows: Sequence[Entry]) -> str:
    return f"{len(rows)} rows, {rows[0].seq} to {rows[-1].seq}" if rows else "no rows"
