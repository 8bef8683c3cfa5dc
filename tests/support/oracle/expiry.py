"""Messages that the server removes by TTL or PURGE, and when that excuses a query. Pure.

A message with a TTL is in the stream from when it is stored, which is between its sending and its
PubAck, until the TTL has expired. If it was the last one of its key, a marker then takes its place
for :data:`MARKER_TTL` seconds. A PURGE removes all earlier messages of its key. Such a marker does
too, including a message that was in flight to the followers when the leader decided on the marker
(nats-server 2.15.1). So a missing message is excused only as far as the ledger's times explain it:

- *removed* from the stream: its TTL had expired when the stream was read, or a PURGE came after it,
  or the marker of an earlier message. An unsure PURGE may have been stored after later writes;
- *unread*, in a sink with all messages: it was removed before the last attempt of its micro-batch
  ended. A power loss may remove the PURGE and so restore what it had removed;
- *stale row* in the table of current values although the bucket no longer has the key: none of the
  later messages of the key (a later entry, the marker) can have been read, because no micro-batch
  was planned and read while it was in the bucket. A marker in the stream is proof: it was read if
  the query committed its sequence. A row of an earlier message follows the same rule. A reconciled
  table lacks such rows, unless the key was removed after the comparison.

The server writes a marker with a delay: it may be missing when the stream is read, and comes later
if servers were down. It is expected at most :data:`_MAX_MARKER_DELAY` seconds after the TTL, so
that a row that is never removed is found.

:class:`Supersession`: a bucket keeps a limited number of revisions per key, and a PURGE removes all
earlier ones. A micro-batch need not have a revision that was removed before the micro-batch was
committed. One of the later writes may be unsure and may have been superseded itself: then a
sequence exists in that range of which neither ledger nor sink has an entry. A micro-batch of last
values (``listed``) has the last revision of each key in its range, and no earlier one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.support.oracle.evidence import (
    PURGE,
    Entry,
    Evidence,
    MicroBatchRange,
    QueryProgress,
    Rollback,
    Write,
    WriteIndex,
)

_Content = tuple[str, str, bytes | None]


class Supersession:
    """Decides which revisions of a source its micro-batches could still find.

    Args:
        batches: the micro-batches of the query, from the start on; without them, all revisions are
            required.
        history: how many revisions of a key the bucket keeps; -1 for any number.
    """

    def __init__(
        self,
        writes: Iterable[Write],
        rows: Sequence[Entry],
        batches: Sequence[MicroBatchRange],
        history: int = -1,
    ) -> None:
        self._batches = batches
        self._ends = [batch.end for batch in batches]
        self._history = history
        self._operations = {row.seq: row.operation for row in rows}
        contents = {row.seq: (row.key, row.operation, row.value) for row in rows}
        acked: Counter[_Content] = Counter()
        unsure: Counter[_Content] = Counter()
        for write in writes:
            content = write.key, write.operation, write.value
            if write.seq is None:
                unsure[content] += 1
            else:
                acked[content] += 1
                contents[write.seq] = content
                self._operations[write.seq] = write.operation
        self._seqs = sorted(contents)
        self._of_key: dict[str, list[int]] = {}
        for seq in self._seqs:
            self._of_key.setdefault(contents[seq][0], []).append(seq)
        # Unsure writes that are not in the sink. The PURGEs first: one is sufficient.
        self._unsure: dict[str, list[str]] = {}
        for key, operation, _ in (unsure - (Counter(contents.values()) - acked)).elements():
            self._unsure.setdefault(key, []).append(operation)
        for operations in self._unsure.values():
            operations.sort(key=lambda operation: operation != PURGE)

    def excuse(self, write: Write) -> str | None:
        """Why the sink need not have an acknowledged write; None if it must."""
        assert write.seq is not None
        batch = self._batch(write.seq)
        if batch is None:
            return None
        seqs = self._of_key[write.key]
        if batch.listed and self._last_in(batch, seqs) != write.seq:
            return "superseded"
        later = seqs[bisect_right(seqs, write.seq) : bisect_right(seqs, batch.known)]
        operations = [self._operations[seq] for seq in later]
        between = bisect_right(self._seqs, batch.known) - bisect_right(self._seqs, write.seq)
        unknown = batch.known - write.seq - between
        operations += self._unsure.get(write.key, [])[: max(unknown, 0)]
        kept = 1 if batch.listed else self._history
        if PURGE in operations:
            return "purged"
        return "superseded" if 0 < kept <= len(operations) else None

    def superseded(self, row: Entry) -> bool:
        """Whether a row of a micro-batch of last values is not the last one of its key."""
        batch = self._batch(row.seq)
        return (
            batch is not None
            and batch.listed
            and self._last_in(batch, self._of_key[row.key]) != row.seq
        )

    def _batch(self, seq: int) -> MicroBatchRange | None:
        i = bisect_left(self._ends, seq)
        return self._batches[i] if i < len(self._batches) else None

    @staticmethod
    def _last_in(batch: MicroBatchRange, seqs: list[int]) -> int:
        """The last of a key's sequences in the range of a micro-batch."""
        return seqs[bisect_right(seqs, batch.end) - 1]


MARKER_TTL = 45
"""Seconds that a marker of the server stays in a bucket, and therefore the shortest TTL."""

MAX_STORE_DELAY = 60.0
"""Seconds for which a paused server may hold an unsure write before it is stored."""

_MAX_MARKER_DELAY = 120.0  # seconds; killed servers have restarted and elected a leader by then
_REPORT_DELAY = 5.0  # seconds; a busy Spark reports a micro-batch after it plans the next one
_CLOCK_TOLERANCE = 1.0  # seconds; the server rounds the times of expiry
_REMOVAL_DELAY = 15.0  # seconds in which a healthy server removes an expired message


def has_ttl(key: str) -> bool:
    """Whether messages of a key have a TTL."""
    return key.startswith("ttl.")


def may_have_expired(write: Write, by: float) -> bool:
    """Whether the TTL of a write may have expired at time ``by``."""
    return write.ttl > 0 and write.sent_at + write.ttl <= by + _CLOCK_TOLERANCE


class Expiry:
    """Which messages of a source may be removed, and which of them a query may have missed.

    Args:
        entries: messages of the stream and rows of its sink; their PURGE markers count.
    """

    def __init__(self, evidence: Evidence, source: str, entries: Iterable[Entry] = ()) -> None:
        self._source = source
        self._progress = evidence.progress.get(source, QueryProgress())
        self._messages_read_at = evidence.messages_read_at
        self._reconciled_at = evidence.reconciled_at
        self._index = WriteIndex(evidence.writes[source])
        self._of_key: dict[str, list[Write]] = {}
        self._last_purge: dict[str, int] = {}
        self._markers: dict[str, list[int]] = {}
        for write in evidence.writes[source]:
            self._of_key.setdefault(write.key, []).append(write)
            if write.operation == PURGE and write.seq is not None:
                self._last_purge[write.key] = max(self._last_purge.get(write.key, 0), write.seq)
        for entry in entries:
            if entry.operation == PURGE:
                self._markers.setdefault(entry.key, []).append(entry.seq)
                self._last_purge[entry.key] = max(self._last_purge.get(entry.key, 0), entry.seq)

    # -- removed messages -------------------------------------------------------------------------

    def removal(self, write: Write, by: float | None = None) -> str | None:
        """Why the stream may lack an acknowledged write; None if it must have it."""
        assert write.seq is not None
        by = self._messages_read_at if by is None else by
        if may_have_expired(write, by):
            return "TTL"
        if self._may_be_purged(by, write.key, write.seq, write.sent_at):
            return "purged"
        return "marker" if self._may_be_removed_by_marker(by, write) else None

    def _may_be_purged(self, by: float, key: str, seq: int, since: float) -> bool:
        """Whether a PURGE after ``seq`` may have been stored at time ``by``.

        Args:
            since: approximate time of the write that it removed.
        """
        return (
            key.startswith("purge.")
            and self._last_purge.get(key, 0) > seq
            and any(
                purge.operation == PURGE
                and purge.sent_at <= by
                and (
                    purge.sent_at > since - MAX_STORE_DELAY
                    if purge.seq is None
                    else purge.seq > seq
                )
                for purge in self._of_key.get(key, ())
            )
        )

    def _may_be_removed_by_marker(self, by: float, write: Write) -> bool:
        """Whether the marker of a message that expired during a write may be stored by then."""
        assert write.seq is not None
        seq = write.seq
        marker = min((m for m in self._markers.get(write.key, ()) if m > seq), default=None)
        if marker is None or not has_ttl(write.key):
            return False
        decided = any(
            (earlier.seq is None or earlier.seq < seq)
            and may_have_expired(earlier, by)
            and earlier.sent_at + earlier.ttl > write.sent_at - MAX_STORE_DELAY
            for earlier in self._of_key[write.key]
        )
        # The time of the marker is unknown, but after all writes with smaller sequences were sent.
        stored = max(
            other.sent_at
            for other in self._index.by_number.values()
            if other.seq is not None and other.seq < marker
        )
        return decided and stored <= by

    def unread_reason(self, write: Write) -> str | None:
        """Why a sink with all messages may lack a removed write; None if it must have it."""
        assert write.seq is not None
        return self.removal(write, self._read_at(write.seq))

    def restored(self, entry: Entry, rollback: Rollback) -> bool:
        """Whether a message is in the stream only because the rollback removed its PURGE.

        The query need not have read it if it read after the PURGE.
        """
        by = min(self._read_at(entry.seq), rollback.at)
        return self._may_be_purged(
            by, entry.key, max(entry.seq, rollback.kept[self._source]), entry.at
        )

    def _read_at(self, seq: int) -> float:
        """When the micro-batch of a sequence was read for the last time."""
        return next(
            (ended for last, ended in self._progress.completed if last >= seq),
            self._messages_read_at,
        )

    # -- markers of the server --------------------------------------------------------------------

    def may_be_marker(self, row: Entry) -> bool:
        """Whether a row may be a marker of the server: a message of its key had expired."""
        return row.operation == PURGE and any(
            may_have_expired(write, row.at or self._read_at(row.seq))
            and (write.seq is None or write.seq < row.seq)
            for write in self._of_key.get(row.key, ())
        )

    # -- stale rows in the table ------------------------------------------------------------------

    def may_be_stale(self, row: Entry, last: Entry | None) -> bool:
        """Whether the table may have ``row`` although the bucket no longer has its key.

        Args:
            last: the bucket's marker of the key; None if the bucket has no message of it.
        """
        write = self._written(row)
        if write is None or not may_have_expired(write, self._messages_read_at):
            return False
        later = self._later(row)
        if not all(self._may_be_missed(w.acked_at, self._present_until(w)) for w in later):
            return False
        if last is not None:
            return last.seq > self._progress.committed
        newest = max([write, *later], key=lambda w: w.sent_at)
        return self._expired_by(
            newest
        ) + _REMOVAL_DELAY > self._messages_read_at or self._marker_may_be_missed(newest)

    def may_be_stale_after_reconcile(self, row: Entry, last: Entry | None) -> bool:
        """The same for a reconciled table: the key was removed after ``reconcile``."""
        write = self._written(row)
        if write is None or not may_have_expired(write, self._messages_read_at) or self._later(row):
            return False
        if last is not None:
            return last.at > self._reconciled_at
        # Without a marker: it was written and removed since, or the message expired since.
        expired_by = self._expired_by(write)
        if expired_by + _REMOVAL_DELAY > self._reconciled_at:
            return True
        marker_at = max(self._reconciled_at, write.sent_at + write.ttl)
        return (
            marker_at <= expired_by + _MAX_MARKER_DELAY
            and marker_at + MARKER_TTL <= self._messages_read_at
        )

    def _expired_by(self, write: Write) -> float:
        """When the TTL of a write has expired at the latest."""
        return (write.acked_at or write.sent_at + _MAX_MARKER_DELAY) + write.ttl

    def _written(self, row: Entry) -> Write | None:
        """The write of a row whose key has a TTL."""
        write = self._index.find(row.value)
        if write is None or write.key != row.key or not has_ttl(row.key):
            return None
        return write if write.seq in (None, row.seq) else None

    def _later(self, row: Entry) -> list[Write]:
        """The acknowledged writes of its key after a row."""
        writes = self._of_key[row.key]
        return [write for write in writes if write.seq is not None and write.seq > row.seq]

    def _present_until(self, write: Write) -> float:
        """Until when a bucket with one revision per key certainly has a write."""
        later = (w.sent_at for w in self._of_key[write.key] if w.number > write.number)
        return min(write.sent_at + write.ttl, *later, float("inf"))

    def _marker_may_be_missed(self, write: Write) -> bool:
        """Whether the marker of an expired write may have been written and removed unread."""
        first = write.sent_at + write.ttl
        # The longest time unread starts right after a micro-batch was planned.
        reports = self._progress.reported_at
        starts = [first, *(reported - _REPORT_DELAY + 0.001 for reported in reports)]
        return any(
            first <= start <= first + _MAX_MARKER_DELAY
            and start + MARKER_TTL <= self._messages_read_at
            and self._may_be_missed(start, start + MARKER_TTL)
            for start in starts
        )

    def _may_be_missed(self, since: float, until: float) -> bool:
        """Whether a message in the bucket from ``since`` to ``until`` may be unread.

        A micro-batch that was planned after ``since`` and ended before ``until`` has read it.
        """
        reports = self._progress.reported_at
        return not any(
            previous - _REPORT_DELAY >= since and reported <= until
            for previous, reported in itertools.pairwise(reports)
        )
