"""The oracle for the table of current values: compares the table with the bucket. Pure.

For each key, the table has the bucket's last entry if that is a value, and no row if it is a
marker. If the bucket has no entry of a key, or a marker of the server, the table may have a row
only as ``expiry.py`` allows. The bucket is compared with the ledger: for each key it has the last
acknowledged write, or a later unsure one.

The table of a query that stopped for data loss is compared with the ledger instead: it is the
bucket as of the end of the query's last micro-batch. A bucket that keeps one revision per key may
have delivered a later one by then, and a micro-batch that was not committed may have been merged.
So keys with a write after that end, or with an unsure write, are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.oracle.evidence import (
    Entry,
    Evidence,
    QueryProgress,
    describe,
    matches_write,
    same_entry,
)
from tests.support.oracle.expiry import MAX_STORE_DELAY, Expiry, has_ttl, may_have_expired
from tests.support.oracle.findings import Findings
from tests.support.oracle.ledger import PUT, Write, WriteIndex


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
