"""What the server removes by itself, and when that excuses a query. Pure.

An entry with a TTL is in the stream from the moment it is stored, which is between its sending and
its PubAck, until the TTL has run out. Where it was its key's last one, a marker then stands in its
place, for :data:`~soak.servers.MARKER_TTL` seconds; then nothing does. A PURGE removes what its key
had before, and so does such a marker: also what was written anew, where that was on its way to the
followers when the leader decided on the marker (nats-server 2.15.1). So what is missing is excused
only as far as the ledger's times explain it:

- *gone* from the stream: its TTL has run out when the stream was read, or a PURGE came after it, or
  the marker of an entry before it; an unsure one may have been stored after what was written since;
- *unread*, in a sink that has every message: it was gone before the last attempt of its
  micro-batch was over. A power loss may take the PURGE and so bring back what it had removed;
- *a row that stays* in the table of current values though its key has gone: nothing that the bucket
  had of the key since (a later entry, the marker) can have been read, because no micro-batch was
  planned and read while it was there. A marker that is there is proof: it was read if the query
  came that far. A row of an earlier entry is held to the same. A reconciled table has no such row,
  unless the key went after it was compared.

A marker comes a moment late, and may not be there yet when the stream is read; it comes later where
the servers were away. It is looked for up to :data:`_LATE` seconds after the TTL, so that no row
stays for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from soak.findings import Entry, Evidence, Loss, Reading
from soak.ledger import PURGE, Write, number_of
from soak.servers import MARKER_TTL

DELAYED = 60.0  # seconds that an unsure write may lie in a server that hangs before it is stored

_LATE = 120.0  # seconds; servers that were killed are back and have a leader by then
_TOLD = 5.0  # seconds; a busy Spark reports a micro-batch later than it plans the next one
_CLOCK = 1.0  # seconds; a server rounds when it looks for what has expired
_SOON = 15.0  # seconds; a server that is well has removed by then what has expired


def expires(key: str) -> bool:
    """Whether entries of a key have a TTL."""
    return key.startswith("ttl.")


def expired(write: Write, by: float) -> bool:
    """Whether a write's TTL can have run out ``by`` then."""
    return write.ttl > 0 and write.sent_at + write.ttl <= by + _CLOCK


class Expiry:
    """What may be gone of one place, and what a query may have missed.

    Args:
        purges: the PURGE markers that were seen of it, in the stream or in a sink, among others.
    """

    def __init__(self, evidence: Evidence, place: str, purges: Iterable[Entry] = ()) -> None:
        self._place = place
        self._reading = evidence.readings.get(place, Reading())
        self._held_at = evidence.held_at
        self._reconciled_at = evidence.reconciled_at
        self._by_number = {write.number: write for write in evidence.writes[place]}
        self._of_key: dict[str, list[Write]] = {}
        self._purged: dict[str, int] = {}
        self._markers: dict[str, list[int]] = {}
        for write in evidence.writes[place]:
            self._of_key.setdefault(write.key, []).append(write)
            if write.operation == PURGE and write.seq is not None:
                self._purged[write.key] = max(self._purged.get(write.key, 0), write.seq)
        for entry in purges:
            if entry.operation == PURGE:
                self._markers.setdefault(entry.key, []).append(entry.seq)
                self._purged[entry.key] = max(self._purged.get(entry.key, 0), entry.seq)

    # -- entries that are gone --------------------------------------------------------------------

    def gone(self, write: Write, by: float | None = None) -> str | None:
        """Why the stream need not have an acknowledged write any more; None if it must.

        Args:
            by: at that time; when the streams were read, if None.
        """
        assert write.seq is not None
        by = self._held_at if by is None else by
        if expired(write, by):
            return "TTL"
        if self._purged_by(by, write.key, write.seq, write.sent_at):
            return "purged"
        return "marker" if self._marked_by(by, write) else None

    def _purged_by(self, by: float, key: str, seq: int, since: float) -> bool:
        """Whether a purge that was stored after ``seq`` can have been there ``by`` then.

        Args:
            since: about when what it removed was written.
        """
        return (
            key.startswith("purge.")
            and self._purged.get(key, 0) > seq
            and any(
                one.operation == PURGE
                and one.sent_at <= by
                and (one.sent_at > since - DELAYED if one.seq is None else one.seq > seq)
                for one in self._of_key.get(key, ())
            )
        )

    def _marked_by(self, by: float, write: Write) -> bool:
        """Whether the marker of an entry that expired as a write came can have been there."""
        assert write.seq is not None
        seq = write.seq
        marker = min((m for m in self._markers.get(write.key, ()) if m > seq), default=None)
        if marker is None or not expires(write.key):
            return False
        decided = any(
            (one.seq is None or one.seq < seq)
            and expired(one, by)
            and one.sent_at + one.ttl > write.sent_at - DELAYED
            for one in self._of_key[write.key]
        )
        # Nobody tells when it was stored; not before what has a smaller sequence was sent.
        stored = max(
            one.sent_at
            for one in self._by_number.values()
            if one.seq is not None and one.seq < marker
        )
        return decided and stored <= by

    def unread(self, write: Write) -> str | None:
        """Why a sink with every message need not have a write that is gone; None if it must."""
        assert write.seq is not None
        return self.gone(write, self._over(write.seq))

    def returned(self, entry: Entry, loss: Loss) -> bool:
        """Whether an entry is there only since the power loss took the purge that had removed it.

        The query need not have read it where the purge came before.
        """
        by = min(self._over(entry.seq), loss.at)
        return self._purged_by(by, entry.key, max(entry.seq, loss.kept[self._place]), entry.at)

    def _over(self, seq: int) -> float:
        """When a message had been read for the last time, if it was there."""
        return next((over for last, over in self._reading.spans if last >= seq), self._held_at)

    # -- the server's markers ---------------------------------------------------------------------

    def marked(self, row: Entry) -> bool:
        """Whether a marker can be the server's own: of an entry that had expired by then."""
        return row.operation == PURGE and any(
            expired(write, row.at or self._over(row.seq))
            and (write.seq is None or write.seq < row.seq)
            for write in self._of_key.get(row.key, ())
        )

    # -- rows that stay in the table --------------------------------------------------------------

    def stays(self, row: Entry, last: Entry | None) -> bool:
        """Whether the table may have ``row`` though the bucket has no such key any more.

        Args:
            last: the bucket's marker of the key; None where the bucket has nothing of it.
        """
        write = self._written(row)
        if write is None or not expired(write, self._held_at):
            return False
        later = self._later(row)
        if not all(self._missed(one.acked_at, self._there_until(one)) for one in later):
            return False
        if last is not None:
            return last.seq > self._reading.through
        newest = max([write, *later], key=lambda one: one.sent_at)
        return self._gone_by(newest) + _SOON > self._held_at or self._marker_missed(newest)

    def stays_reconciled(self, row: Entry, last: Entry | None) -> bool:
        """The same for a table that was reconciled: the key went after that."""
        write = self._written(row)
        if write is None or not expired(write, self._held_at) or self._later(row):
            return False
        if last is not None:
            return last.at > self._reconciled_at
        # No marker: it came and went since, or the entry expired since.
        gone = self._gone_by(write)
        if gone + _SOON > self._reconciled_at:
            return True
        came = max(self._reconciled_at, write.sent_at + write.ttl)
        return came <= gone + _LATE and came + MARKER_TTL <= self._held_at

    def _gone_by(self, write: Write) -> float:
        """When a write's TTL has run out at the latest."""
        return (write.acked_at or write.sent_at + _LATE) + write.ttl

    def _written(self, row: Entry) -> Write | None:
        """Who wrote a row of a key that expires."""
        number = None if row.value is None else number_of(row.value)
        write = None if number is None else self._by_number.get(number)
        if write is None or write.key != row.key or not expires(row.key):
            return None
        return write if write.seq in (None, row.seq) else None

    def _later(self, row: Entry) -> list[Write]:
        """The acknowledged writes of its key that came after a row."""
        writes = self._of_key[row.key]
        return [one for one in writes if one.seq is not None and one.seq > row.seq]

    def _there_until(self, write: Write) -> float:
        """When a bucket that keeps one entry of a key may not have a write's any more."""
        next_ones = (o.sent_at for o in self._of_key[write.key] if o.number > write.number)
        return min(write.sent_at + write.ttl, *next_ones, float("inf"))

    def _marker_missed(self, write: Write) -> bool:
        """Whether the marker of an expired write may have come and gone unread."""
        first = write.sent_at + write.ttl
        # It is missed by most right after a micro-batch was planned.
        starts = [first, *(told - _TOLD + 0.001 for told in self._reading.reports)]
        return any(
            first <= start <= first + _LATE
            and start + MARKER_TTL <= self._held_at
            and self._missed(start, start + MARKER_TTL)
            for start in starts
        )

    def _missed(self, since: float, until: float) -> bool:
        """Whether what was in the bucket from ``since`` to ``until`` need not have been read.

        A micro-batch that was planned after ``since`` and was over before ``until`` has read it.
        """
        reports = self._reading.reports
        return not any(
            before - _TOLD >= since and over <= until
            for before, over in itertools.pairwise(reports)
        )
