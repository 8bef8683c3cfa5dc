"""Revisions that later ones superseded before their micro-batch was read. Pure.

A bucket keeps a limited number of revisions per key, and a PURGE removes all earlier ones. A
micro-batch need not have a revision that was removed before the micro-batch was committed. One of
the later writes may be unsure and may have been superseded itself: then a sequence exists in that
range of which neither ledger nor sink has an entry.

A micro-batch of last values (``listed``) has the last revision of each key in its range, and no
earlier one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.support.oracle.evidence import Entry, MicroBatchRange
from tests.support.oracle.ledger import PURGE, Write

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
