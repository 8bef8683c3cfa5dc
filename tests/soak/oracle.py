"""The oracle: does what the queries delivered agree with what was written? Pure.

It knows four things of a bucket or stream: the ledger, the messages that the servers hold at the
end (read with another client), the rows in the sink, in their order, and when the query read how
far. It says:

================  ==========================================================================
``not read``      acknowledged, or held by the stream at the end, and in no row
``read twice``    in more than one row
``out of order``  a row after one with a greater sequence (so of a key's rows, too)
``not written``   a row that nobody wrote: another value, key, operation or sequence
``replayed``      a micro-batch that ran again had other rows
``unequal``       the Delta table and the bucket differ in a key (``table.py``)
``server lost``   acknowledged, and the servers do not have it (see below)
================  ==========================================================================

Some acknowledged writes may go unread, since the server removes them by itself: what a later PURGE
of the key rolled up, and what had a TTL. Only keys that begin with ``purge.`` are purged and only
keys that begin with ``ttl.`` have a TTL, so that all others are held to the full promise; and those
are excused only where the ledger's times explain it (``expiry.py``). A server's own marker, where
an entry expired, is a row that nobody wrote, of a ``ttl.`` key.

An unsure write may be there or not, but at most once, whole, and where the stream has it.

``server lost``: the source is not to blame; but if rows had been delivered that are gone, the query
must have noticed (DataLossError), else ``loss unnoticed`` is an anomaly of its own. What was lost
on purpose (:class:`~soak.findings.Loss`) is excused. A query that stopped owes all that it had
committed: what was acknowledged before the loss, up to where it had come; and nothing of what was
written after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from soak.expiry import Expiry, expires
from soak.findings import Entry, Evidence, Findings, Reading, equal, said, same
from soak.ledger import PURGE, PUT, Write, number_of
from soak.table import judge_table


def judge(evidence: Evidence) -> Findings:
    """Compare everything."""
    findings = Findings()
    for place, attempts in evidence.attempts.items():
        findings.merge(judge_replays(place, attempts, compacts=place in evidence.buckets))
        findings.merge(judge_rows(place, evidence))
    findings.merge(judge_table("current", evidence))
    return findings


def judge_rows(place: str, evidence: Evidence) -> Findings:
    """Compare a sink that has every message with the ledger and the stream."""
    return _Rows(place, evidence).judge()


class _Rows:
    def __init__(self, place: str, evidence: Evidence) -> None:
        self.findings = Findings()
        self.place = place
        self.loss = evidence.loss
        self.stopped = place in evidence.stopped
        self.rows = evidence.rows(place)
        self.held = {entry.seq: entry for entry in evidence.held[place]}
        self.expiry = Expiry(evidence, place, [*self.rows, *self.held.values()])
        self.through = evidence.readings.get(place, Reading()).through
        writes = evidence.writes[place]
        self.by_number = {write.number: write for write in writes}
        self.acked: dict[int, list[Write]] = {}
        self.unsure_markers: Counter[tuple[str, str]] = Counter()
        for write in writes:
            if write.seq is not None:
                self.acked.setdefault(write.seq, []).append(write)
            elif write.operation != PUT:
                self.unsure_markers[write.key, write.operation] += 1

    def judge(self) -> Findings:
        read = self._rows()
        self._held_unread(read)
        self._acked_unread(read)
        return self.findings

    def _add(self, kind: str, text: str) -> None:
        self.findings.add(kind, f"{self.place}: {text}")

    def _kept(self, seq: int) -> bool:
        """Whether what the stream has there is what it had when the query read it."""
        if not self.stopped:
            return True
        return self.loss is not None and seq <= self.loss.kept[self.place]

    # -- what is in the sink ----------------------------------------------------------------------

    def _rows(self) -> dict[int, Entry]:
        seen: set[tuple[object, int]] = set()
        read: dict[int, Entry] = {}
        stored: dict[int, int] = {}
        greatest = 0
        if len({row.created for row in self.rows}) > 1:
            self._add("not written", "rows of two streams, and there is one")
        for row in self.rows:
            if (row.created, row.seq) in seen:
                self._add("read twice", said(row))
                continue
            seen.add((row.created, row.seq))
            read[row.seq] = row
            if row.seq < greatest:
                self._add("out of order", f"{said(row)} after {greatest}")
            greatest = max(greatest, row.seq)
            if (why := self._strange(row, stored)) is not None:
                self._add("not written", f"{said(row)}: {why}")
            elif self._too_late(row):
                self._add("loss unnoticed", f"{said(row)} was written after the loss")
        return read

    def _strange(self, row: Entry, stored: dict[int, int]) -> str | None:
        """What is wrong with a row; None when somebody wrote it."""
        acked = self.acked.get(row.seq, [])
        if any(same(write, row) for write in acked):
            return None
        held = self.held.get(row.seq)
        if held is not None and not equal(held, row) and self._kept(row.seq):
            return f"the stream has {said(held)} there"
        if acked and held is None and self._kept(row.seq):
            return f"{acked[0]} was acknowledged"
        if row.operation == PUT:
            return self._strange_value(row, held, stored)
        if expires(row.key) and row.operation == PURGE:
            return None if self.expiry.marked(row) else "nothing of its key had expired"
        if self.unsure_markers[row.key, row.operation] > 0:
            self.unsure_markers[row.key, row.operation] -= 1
            return None
        return "nobody wrote this marker" + (f"; {acked[0]} was acknowledged" if acked else "")

    def _strange_value(self, row: Entry, held: Entry | None, stored: dict[int, int]) -> str | None:
        number = None if row.value is None else number_of(row.value)
        write = None if number is None else self.by_number.get(number)
        if write is None:
            return "nobody's value"
        if (write.key, write.operation) != (row.key, PUT):
            return f"{write.number} was written to {write.key}"
        if write.seq is not None and write.seq != row.seq and held is None:
            return f"{write.number} was acknowledged as {write.seq}"
        if stored.setdefault(write.number, row.seq) != row.seq and held is None:
            return f"{write.number} is also {stored[write.number]}"
        if held is None and row.key.startswith("put.") and self._kept(row.seq):
            return "the stream has nothing there"
        return None

    def _too_late(self, row: Entry) -> bool:
        """Whether a query that stopped for the loss has a row that was written after it."""
        if self.loss is None or not self.stopped or row.value is None:
            return False
        number = number_of(row.value)
        return number is not None and self.by_number[number].sent_at > self.loss.at

    # -- what is not in the sink ------------------------------------------------------------------

    def _held_unread(self, read: Mapping[int, Entry]) -> None:
        last = max(self.through, max(read, default=0))
        for seq, entry in self.held.items():
            if seq in read or not self._kept(seq) or (self.stopped and seq > self.through):
                continue
            if self.stopped and self.loss is not None and self.expiry.returned(entry, self.loss):
                self.findings.excused["purged, and back"] += 1
                continue
            # Entries go on expiring after all was read.
            if not (seq > last and expires(entry.key) and entry.operation == PURGE):
                self._add("not read", f"{said(entry)}, which the stream holds")

    def _acked_unread(self, read: Mapping[int, Entry]) -> None:
        gone_after_read = 0
        for seq, writes in self.acked.items():
            for write in writes:
                row, held = read.get(seq), self.held.get(seq)
                was_read = row is not None and same(write, row)
                if held is not None and same(write, held):
                    if row is not None and not was_read and not self.stopped:
                        self._add("not read", f"{write}: {said(row)} came in its place")
                    continue
                if self.loss is not None and self.loss.takes(write):
                    self.findings.excused["lost on purpose"] += 1
                elif self.expiry.gone(write) is None:
                    self._add("server lost", f"{write}{', which had been read' * was_read}")
                    gone_after_read += was_read
                    continue
                if not was_read and self._due(write):
                    if (why := self.expiry.unread(write)) is None:
                        self._add("not read", f"{write}, which was there to be read")
                    else:
                        self.findings.excused[why] += 1
        if gone_after_read and not self.stopped:
            self._add("loss unnoticed", f"{gone_after_read} rows are gone that had been read")

    def _due(self, write: Write) -> bool:
        """Whether the query owes an acknowledged write that is gone."""
        assert write.seq is not None
        if not self.stopped:
            return True
        before = self.loss is None or write.acked_at < self.loss.at
        return before and write.seq <= self.through


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


def _span(rows: Sequence[Entry]) -> str:
    return f"{len(rows)} rows, {rows[0].seq} to {rows[-1].seq}" if rows else "no rows"
