"""The oracle's part for the table of current values: is it the bucket? Pure.

Of every key the table has the bucket's last entry where that is a value, and no row where it is a
marker. Where the bucket has nothing of a key any more, or the server's own marker, the table may
have a row only as ``expiry.py`` allows. The bucket in turn is held to the ledger: of every key it
has the last acknowledged write, or an unsure one that came after it.

A query that stopped for data loss is compared with the ledger instead: the table is the bucket as
it was where the query's last micro-batch ended. A bucket that keeps one entry of a key may have
given a later one by then, and a micro-batch that was not committed may have been merged: a key that
was written beyond that end, or by an unsure write, is passed over.
"""

from __future__ import annotations

from collections.abc import Iterable

from soak.expiry import DELAYED, Expiry, expired, expires
from soak.findings import Entry, Evidence, Findings, Reading, equal, said, same
from soak.ledger import PUT, Write, number_of


def judge_table(place: str, evidence: Evidence) -> Findings:
    """Compare the Delta table with the bucket, and the bucket with the ledger."""
    return _Table(place, evidence).judge()


class _Table:
    def __init__(self, place: str, evidence: Evidence) -> None:
        self.findings = Findings()
        self.place = place
        self.evidence = evidence
        self.loss = evidence.loss
        self.expiry = Expiry(evidence, place, evidence.held[place])
        self.by_number = {write.number: write for write in evidence.writes[place]}
        self.last: dict[str, Entry] = {}
        for entry in sorted(evidence.held[place], key=lambda one: one.seq):
            self.last[entry.key] = entry

    def judge(self) -> Findings:
        evidence = self.evidence
        rows = self._rows(evidence.table)
        if self.place in evidence.stopped:
            self._stopped(rows)
        else:
            self._compare(rows, reconciled=False)
        if evidence.reconciled is not None:
            self._compare(self._rows(evidence.reconciled), reconciled=True)
        self._bucket()
        return self.findings

    def _add(self, kind: str, text: str) -> None:
        self.findings.add(kind, f"{self.place}: {text}")

    def _rows(self, table: Iterable[Entry]) -> dict[str, Entry]:
        rows: dict[str, Entry] = {}
        for row in table:
            if row.key in rows:
                self._add("read twice", f"two rows of {row.key}")
            rows[row.key] = row
            written = self._written(row)
            if written is None or written.key != row.key:
                self._add("not written", said(row))
        return rows

    def _written(self, row: Entry) -> Write | None:
        number = None if row.value is None else number_of(row.value)
        return None if number is None else self.by_number.get(number)

    # -- the table and the bucket -----------------------------------------------------------------

    def _compare(self, rows: dict[str, Entry], *, reconciled: bool) -> None:
        live = {key: entry for key, entry in self.last.items() if entry.operation == PUT}
        stays = self.expiry.stays_reconciled if reconciled else self.expiry.stays
        for key in sorted(rows.keys() | live.keys()):
            mine, theirs = rows.get(key), live.get(key)
            if mine is not None and theirs is None and stays(mine, self.last.get(key)):
                self.findings.excused["expired"] += 1
            elif mine is None or theirs is None or not equal(mine, theirs):
                bucket = said(theirs or self.last.get(key))
                when = " when reconciled" * reconciled
                self._add("unequal", f"{key}{when}: table {said(mine)}, bucket {bucket}")

    # -- the table of a query that stopped --------------------------------------------------------

    def _stopped(self, rows: dict[str, Entry]) -> None:
        through = self.evidence.readings.get(self.place, Reading()).through
        stop = self.evidence.held_at if self.loss is None else self.loss.at
        of_key: dict[str, list[Write]] = {}
        for write in self.by_number.values():
            if write.sent_at <= stop:
                of_key.setdefault(write.key, []).append(write)
        for key, row in rows.items():
            written = self._written(row)
            if written is not None and written.sent_at > stop:
                self._add("loss unnoticed", f"{said(row)} was written after the loss")
            elif key not in of_key:
                self._add("unequal", f"{key}: table {said(row)}, and nobody wrote it")
        for key, writes in of_key.items():
            sure = [w for w in writes if w.seq is not None and w.acked_at <= stop]
            unsure = [w for w in writes if w.seq is None or w.acked_at > stop]
            last = max((w for w in sure if _seq(w) <= through), key=_seq, default=None)
            if last is None or any(_seq(w) > through for w in sure):
                continue
            if any(w.sent_at > last.sent_at - DELAYED for w in unsure):
                continue
            mine = rows.get(key)
            if mine is None or mine.seq < _seq(last):
                right = expired(last, stop) or (mine is None and last.operation != PUT)
            else:
                right = same(last, mine) and mine.seq == last.seq
            if not right:
                self._add("unequal", f"{key} at its stop: table {said(mine)}, due was {last}")

    # -- the bucket and the ledger ----------------------------------------------------------------

    def _bucket(self) -> None:
        for write in self.by_number.values():
            if write.seq is None:
                continue
            newest = self.last.get(write.key)
            if newest is not None and newest.seq > write.seq:
                continue
            if newest is not None and newest.seq == write.seq and same(write, newest):
                continue
            if self.loss is not None and self.loss.takes(write):
                self.findings.excused["lost on purpose"] += 1
            elif newest is not None or self.expiry.gone(write) is None:
                self._add("server lost", f"{write}; the bucket has {said(newest)}")
        writes: dict[tuple[str, int | None], list[Write]] = {}
        for write in self.by_number.values():
            writes.setdefault((write.key, write.seq), []).append(write)
        for key, entry in self.last.items():
            known = [*writes.get((key, entry.seq), ()), *writes.get((key, None), ())]
            if not any(same(write, entry) for write in known) and not self._marker(entry):
                self._add("not written", f"the bucket has {said(entry)}")

    def _marker(self, entry: Entry) -> bool:
        """Whether an entry can be the server's own."""
        return expires(entry.key) and self.expiry.marked(entry)


def _seq(write: Write) -> int:
    assert write.seq is not None
    return write.seq
