"""The oracle: compares what the queries delivered with what was written. Pure.

Its input (:class:`~tests.support.oracle.evidence.Evidence`) has for each bucket or stream the
ledger, the messages on the servers at the end (read with another client), the rows in the sink in
their order, and how far and when the query read. Its findings:

================  ==========================================================================
``not read``      acknowledged, or in the stream at the end, and in no row
``read twice``    in more than one row
``out of order``  a row after one with a greater sequence
``not written``   a row without a write: other value, key, operation or sequence
``superseded``    a row of last values that is not the last one of its key
``replayed``      a micro-batch that was retried had other rows
``unequal``       the Delta table and the bucket differ in a key
``server lost``   acknowledged, and no longer on the servers (see below)
================  ==========================================================================

Some acknowledged writes need not be read, because the server removed them: messages before a later
PURGE of their key, messages with a TTL, and revisions beyond the bucket's history
(``expiry.py``). Only keys that start with ``purge.`` are purged and only keys that start with
``ttl.`` have a TTL, so that all other writes are required. Removed messages are excused only if the
ledger's times explain it (``expiry.py``). A marker that the server wrote for an expired message is
a row of a ``ttl.`` key without a write.

An unsure write may be stored or not, but at most once, completely, and at the sequence that the
stream has for it.

``server lost`` is not a fault of the source. But if delivered rows are no longer in the stream, the
query must have reported it (DataLossError), else ``loss unnoticed`` is an anomaly of its own. What
a simulated power loss removed (:class:`~tests.support.oracle.evidence.Rollback`) is excused. A
query that stopped must have delivered what it had committed: what was acknowledged before the loss,
up to its last committed sequence, and nothing that was written after the loss.

For each key, the table of current values has the bucket's last entry if that is a value, and no row
if it is a marker. If the bucket has no entry of a key, or a marker of the server, the table may
have a row only as ``expiry.py`` allows. The bucket is compared with the ledger: for each key it has
the last acknowledged write, or a later unsure one. The table of a query that stopped for data loss
is compared with the ledger instead: it is the bucket as of the end of the query's last micro-batch.
A bucket that keeps one revision per key may have delivered a later one by then, and a micro-batch
that was not committed may have been merged. So keys with a write after that end, or with an unsure
write, are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tests.support.oracle.evidence import (
    PURGE,
    PUT,
    Entry,
    Evidence,
    Findings,
    QueryProgress,
    Write,
    WriteIndex,
    describe,
    matches_write,
    same_entry,
)
from tests.support.oracle.expiry import (
    MAX_STORE_DELAY,
    Expiry,
    Supersession,
    has_ttl,
    may_have_expired,
)


def compare_all(evidence: Evidence) -> Findings:
    """Compare all sinks of a soak."""
    findings = Findings()
    for source, attempts in evidence.attempts.items():
        removes = source in evidence.buckets
        findings.merge(compare_attempts(source, attempts, removes_messages=removes))
        findings.merge(compare_rows(source, evidence))
    findings.merge(compare_table("current", evidence))
    return findings


def compare_rows(source: str, evidence: Evidence) -> Findings:
    """Compare a sink that has all messages with the ledger and the stream."""
    return _RowComparison(source, evidence).compare()


class _RowComparison:
    def __init__(self, source: str, evidence: Evidence) -> None:
        self.findings = Findings()
        self.source = source
        self.rollback = evidence.rollback
        self.stopped = source in evidence.stopped
        self.rows = evidence.rows(source)
        self.stream_was_read = source in evidence.messages
        self.messages = {entry.seq: entry for entry in evidence.messages.get(source, ())}
        self.expiry = Expiry(evidence, source, [*self.rows, *self.messages.values()])
        self.not_required = evidence.not_required.get(source, frozenset())
        progress = evidence.progress.get(source, QueryProgress())
        self.committed = progress.committed
        writes = evidence.writes[source]
        history = evidence.history.get(source, -1)
        self.supersession = Supersession(writes, self.rows, progress.batches, history)
        self.index = WriteIndex(writes)
        self.acked: dict[int, list[Write]] = {}
        self.unsure_markers: Counter[tuple[str, str]] = Counter()
        for write in writes:
            if write.seq is not None:
                self.acked.setdefault(write.seq, []).append(write)
            elif write.operation != PUT:
                self.unsure_markers[write.key, write.operation] += 1

    def compare(self) -> Findings:
        delivered = self._compare_delivered()
        self._compare_stream(delivered)
        self._compare_acked(delivered)
        return self.findings

    def _add(self, kind: str, text: str) -> None:
        self.findings.add(kind, f"{self.source}: {text}")

    def _unchanged(self, seq: int) -> bool:
        """Whether the stream still has at ``seq`` what it had when the query read it."""
        if not self.stopped:
            return True
        return self.rollback is not None and seq <= self.rollback.kept[self.source]

    # -- rows of the sink -------------------------------------------------------------------------

    def _compare_delivered(self) -> dict[int, Entry]:
        seen: set[tuple[object, int]] = set()
        delivered: dict[int, Entry] = {}
        unsure_at: dict[int, int] = {}
        greatest = 0
        if len({row.created for row in self.rows}) > 1:
            self._add("not written", "rows of two streams, expected one")
        for row in self.rows:
            if (row.created, row.seq) in seen:
                self._add("read twice", describe(row))
                continue
            seen.add((row.created, row.seq))
            delivered[row.seq] = row
            if row.seq < greatest:
                self._add("out of order", f"{describe(row)} after {greatest}")
            greatest = max(greatest, row.seq)
            if (reason := self._unwritten(row, unsure_at)) is not None:
                self._add("not written", f"{describe(row)}: {reason}")
            elif self._written_after_rollback(row):
                self._add("loss unnoticed", f"{describe(row)} was written after the loss")
            if self.supersession.superseded(row):
                self._add("superseded", f"{describe(row)} in a micro-batch of last values")
        return delivered

    def _unwritten(self, row: Entry, unsure_at: dict[int, int]) -> str | None:
        """Why a row does not match any write; None if it does."""
        acked = self.acked.get(row.seq, [])
        if any(matches_write(write, row) for write in acked):
            return None
        message = self.messages.get(row.seq)
        if message is not None and not same_entry(message, row) and self._unchanged(row.seq):
            return f"another row, the stream has {describe(message)} there"
        if acked and message is None and self._unchanged(row.seq):
            return f"another row, {acked[0]} was acknowledged"
        if row.operation == PUT:
            return self._unwritten_value(row, message, unsure_at)
        if has_ttl(row.key) and row.operation == PURGE:
            return None if self.expiry.may_be_marker(row) else "no message of its key had expired"
        if self.unsure_markers[row.key, row.operation] > 0:
            self.unsure_markers[row.key, row.operation] -= 1
            return None
        reason = "marker was never written"
        return f"{reason}; {acked[0]} was acknowledged" if acked else reason

    def _unwritten_value(
        self, row: Entry, message: Entry | None, unsure_at: dict[int, int]
    ) -> str | None:
        write = self.index.find(row.value)
        if write is None:
            return "value was never written"
        if (write.key, write.operation) != (row.key, PUT):
            return f"{write.number} was written to {write.key}"
        if write.seq is not None and write.seq != row.seq and message is None:
            return f"value at two sequences, {write.number} was acknowledged as {write.seq}"
        first = unsure_at.setdefault(write.number, row.seq)
        if first != row.seq and message is None:
            return f"value at two sequences, {write.number} is also {first}"
        missing = message is None and self.stream_was_read and self._unchanged(row.seq)
        if missing and row.key.startswith("put."):
            return "the stream lacks this sequence"
        return None

    def _written_after_rollback(self, row: Entry) -> bool:
        """Whether a query that stopped for the rollback has a row that was written after it."""
        if self.rollback is None or not self.stopped:
            return False
        write = self.index.find(row.value)
        return write is not None and write.sent_at > self.rollback.at

    # -- writes that are not in the sink ----------------------------------------------------------

    def _compare_stream(self, delivered: Mapping[int, Entry]) -> None:
        last = max(self.committed, max(delivered, default=0))
        for seq, entry in self.messages.items():
            if seq in delivered or not self._unchanged(seq):
                continue
            if self.stopped and seq > self.committed:
                continue
            if (
                self.stopped
                and self.rollback is not None
                and self.expiry.restored(entry, self.rollback)
            ):
                self.findings.excused["purged and restored"] += 1
                continue
            # Messages expire also after the query has read all.
            if not (seq > last and has_ttl(entry.key) and entry.operation == PURGE):
                self._add("not read", f"{describe(entry)}, which is in the stream")

    def _compare_acked(self, delivered: Mapping[int, Entry]) -> None:
        lost_after_read = 0
        for seq, writes in self.acked.items():
            for write in writes:
                row, message = delivered.get(seq), self.messages.get(seq)
                was_read = row is not None and matches_write(write, row)
                if message is not None and matches_write(write, message):
                    if row is not None and not was_read and not self.stopped:
                        self._add("not read", f"{write}: {describe(row)} was read instead")
                    continue
                if self.rollback is not None and self.rollback.may_remove(write):
                    self.findings.excused["rolled back"] += 1
                elif self.stream_was_read and self.expiry.removal(write) is None:
                    self._add("server lost", f"{write}{', which had been read' * was_read}")
                    lost_after_read += was_read
                    continue
                if not was_read and self._required(write):
                    self._check_excuse(write)
        if lost_after_read and not self.stopped:
            self._add("loss unnoticed", f"{lost_after_read} rows that had been read are missing")

    def _check_excuse(self, write: Write) -> None:
        reason = self.expiry.unread_reason(write) or self.supersession.excuse(write)
        if reason is None:
            self._add("not read", f"{write}, which was in the stream when it was read")
        else:
            self.findings.excused[reason] += 1

    def _required(self, write: Write) -> bool:
        """Whether the sink must have an acknowledged write that the stream no longer has."""
        assert write.seq is not None
        if write.seq in self.not_required:
            return False
        if not self.stopped:
            return True
        before = self.rollback is None or write.acked_at < self.rollback.at
        return before and write.seq <= self.committed


def compare_attempts(
    source: str, attempts: Mapping[int, Sequence[Sequence[Entry]]], *, removes_messages: bool
) -> Findings:
    """Compare the attempts of each micro-batch: a range that is read again has the same rows.

    Args:
        attempts: by batch id, the rows of each complete attempt.
        removes_messages: whether messages of ``purge.`` and ``ttl.`` keys may be removed between
            two attempts.
    """
    findings = Findings()
    for batch, tries in attempts.items():
        compared = [
            [r for r in rows if not (removes_messages and r.key.startswith(("purge.", "ttl.")))]
            for rows in tries
        ]
        for rows in compared[1:]:
            if rows != compared[0]:
                findings.add(
                    "replayed",
                    f"{source}: micro-batch {batch} had {_span(compared[0])}, then {_span(rows)}",
                )
    return findings


def _span(rows: Sequence[Entry]) -> str:
    return f"{len(rows)} rows, {rows[0].seq} to {rows[-1].seq}" if rows else "no rows"


# -- the table of current values -------------------------------------------------------------------


def compare_table(source: str, evidence: Evidence) -> Findings:
    """Compare the Delta table with the bucket, and the bucket with the ledger."""
    return _TableComparison(source, evidence).compare()


class _TableComparison:
    def __init__(self, source: str, evidence: Evidence) -> None:
        self.findings = Findings()
        self.source = source
        self.evidence = evidence
        self.rollback = evidence.rollback
        self.expiry = Expiry(evidence, source, evidence.messages[source])
        self.index = WriteIndex(evidence.writes[source])
        self.last: dict[str, Entry] = {}
        for entry in sorted(evidence.messages[source], key=lambda message: message.seq):
            self.last[entry.key] = entry

    def compare(self) -> Findings:
        evidence = self.evidence
        rows = self._rows(evidence.table)
        if self.source in evidence.stopped:
            self._compare_stopped(rows)
        else:
            self._compare_with_bucket(rows, reconciled=False)
        if evidence.reconciled is not None:
            self._compare_with_bucket(self._rows(evidence.reconciled), reconciled=True)
        self._compare_bucket()
        return self.findings

    def _add(self, kind: str, text: str) -> None:
        self.findings.add(kind, f"{self.source}: {text}")

    def _rows(self, table: Iterable[Entry]) -> dict[str, Entry]:
        rows: dict[str, Entry] = {}
        for row in table:
            if row.key in rows:
                self._add("read twice", f"two rows of {row.key}")
            rows[row.key] = row
            write = self.index.find(row.value)
            if write is None or write.key != row.key:
                self._add("not written", describe(row))
        return rows

    # -- the table and the bucket -----------------------------------------------------------------

    def _compare_with_bucket(self, rows: dict[str, Entry], *, reconciled: bool) -> None:
        live = {key: entry for key, entry in self.last.items() if entry.operation == PUT}
        may_be_stale = (
            self.expiry.may_be_stale_after_reconcile if reconciled else self.expiry.may_be_stale
        )
        for key in sorted(rows.keys() | live.keys()):
            row, entry = rows.get(key), live.get(key)
            if row is not None and entry is None and may_be_stale(row, self.last.get(key)):
                self.findings.excused["expired"] += 1
            elif row is None or entry is None or not same_entry(row, entry):
                bucket = describe(entry or self.last.get(key))
                when = " after reconcile" * reconciled
                self._add("unequal", f"{key}{when}: table {describe(row)}, bucket {bucket}")

    # -- the table of a stopped query -------------------------------------------------------------

    def _compare_stopped(self, rows: dict[str, Entry]) -> None:
        committed = self.evidence.progress.get(self.source, QueryProgress()).committed
        stop = self.evidence.messages_read_at if self.rollback is None else self.rollback.at
        of_key: dict[str, list[Write]] = {}
        for write in self.index.by_number.values():
            if write.sent_at <= stop:
                of_key.setdefault(write.key, []).append(write)
        for key, row in rows.items():
            written = self.index.find(row.value)
            if written is not None and written.sent_at > stop:
                self._add("loss unnoticed", f"{describe(row)} was written after the loss")
            elif key not in of_key:
                self._add("unequal", f"{key}: table {describe(row)}, which was never written")
        for key, writes in of_key.items():
            sure = [w for w in writes if w.seq is not None and w.acked_at <= stop]
            unsure = [w for w in writes if w.seq is None or w.acked_at > stop]
            last = max((w for w in sure if _seq(w) <= committed), key=_seq, default=None)
            if last is None or any(_seq(w) > committed for w in sure):
                continue
            if any(w.sent_at > last.sent_at - MAX_STORE_DELAY for w in unsure):
                continue
            current = rows.get(key)
            if current is None or current.seq < _seq(last):
                removed = current is None and last.operation != PUT
                equal = removed or may_have_expired(last, stop)
            else:
                equal = matches_write(last, current) and current.seq == last.seq
            if not equal:
                text = f"{key} when the query stopped: table {describe(current)}, expected {last}"
                self._add("unequal", text)

    # -- the bucket and the ledger ----------------------------------------------------------------

    def _compare_bucket(self) -> None:
        for write in self.index.by_number.values():
            if write.seq is None:
                continue
            newest = self.last.get(write.key)
            if newest is not None and newest.seq > write.seq:
                continue
            if newest is not None and newest.seq == write.seq and matches_write(write, newest):
                continue
            if self.rollback is not None and self.rollback.may_remove(write):
                self.findings.excused["rolled back"] += 1
            elif newest is not None or self.expiry.removal(write) is None:
                self._add("server lost", f"{write}; the bucket has {describe(newest)}")
        writes: dict[tuple[str, int | None], list[Write]] = {}
        for write in self.index.by_number.values():
            writes.setdefault((write.key, write.seq), []).append(write)
        for key, entry in self.last.items():
            known = [*writes.get((key, entry.seq), ()), *writes.get((key, None), ())]
            if not any(matches_write(write, entry) for write in known) and not self._may_be_marker(
                entry
            ):
                self._add("not written", f"the bucket has {describe(entry)}")

    def _may_be_marker(self, entry: Entry) -> bool:
        """Whether the server may have written an entry for an expired message."""
        return has_ttl(entry.key) and self.expiry.may_be_marker(entry)


def _seq(write: Write) -> int:
    assert write.seq is not None
    return write.seq


# -- a stream that a query copies into another stream ----------------------------------------------


def compare_copy(messages: Iterable[Entry], copied: Iterable[Entry]) -> Findings:
    """Compare the messages of a stream with those of its copy.

    Their keys and values identify them: the sequences of the copy are others.
    """
    findings = Findings()
    expected = {(entry.key, entry.value): entry for entry in messages}
    copies = Counter((entry.key, entry.value) for entry in copied)
    for content, entry in expected.items():
        if not copies[content]:
            findings.add("not read", f"copy: {describe(entry)}")
        elif copies[content] > 1:
            findings.add("read twice", f"copy: {describe(entry)}: {copies[content]} times")
    for entry in copied:
        if (entry.key, entry.value) not in expected:
            findings.add("not written", f"copy: {describe(entry)}")
    return findings
