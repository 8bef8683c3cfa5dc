"""Were the rows that were read what was written? Pure.

``acknowledged`` has what was written, by sequence; ``attempted`` all that was, also what no PubAck
came for: that may be there or not, and may have come and gone.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from faults.reading import MicroBatch
from faults.rows import Content, Marker, Row, Written

Attempted = Counter[Written]


def check_rows(
    rows: Sequence[Row], acknowledged: Mapping[int, Written], attempted: Attempted
) -> None:
    """Each sequence once and in order; no row that nobody wrote, no value that came twice."""
    seqs = [row.seq for row in rows]
    twice = len(seqs) - len(set(seqs))
    assert not twice, f"{twice} rows were read twice"
    wrong = [b for a, b in itertools.pairwise(seqs) if b <= a]
    assert not wrong, f"out of order: {wrong[:10]}"
    for row in rows:
        key, content = row.written
        if row.seq in acknowledged:
            assert (key, content) == acknowledged[row.seq], f"another row at {row.seq}: {row}"
        else:
            assert (key, content) in attempted, f"never written: {row}"
    values = [row.value for row in rows if row.operation == "PUT"]
    again = len(values) - len(set(values))
    assert not again, f"{again} values were read at two sequences"


def check_all_came(
    rows: Sequence[Row],
    acknowledged: Mapping[int, Written],
    attempted: Attempted,
    history: int,
    done: Sequence[MicroBatch],
) -> None:
    """Each revision that its micro-batch could still find; of a list, each key's last one only.

    A revision goes away by as many later ones of its key as the bucket keeps, or by a PURGE. That
    is an excuse where they were written before its micro-batch was done, and else it is not. One of
    them may be a write that was not acknowledged, and gone before it was read: then there is a
    sequence of which nobody knows.

    Args:
        history: how many of a key the bucket keeps; -1 for any number.
        done: all micro-batches, from the beginning on.
    """
    assert done[0].start == 0
    assert all(a.end == b.start for a, b in itertools.pairwise(done)), "micro-batches do not meet"
    assert done[-1].end >= max(acknowledged), "not all was read"
    read = {row.seq for row in rows}
    known = {row.seq: row.written for row in rows} | dict(acknowledged)
    by_key: dict[str, list[int]] = {}
    for seq in sorted(known):
        by_key.setdefault(known[seq][0], []).append(seq)
    told, unsure = sorted(known), _unsure(attempted, known.values())
    missing, superseded = [], []
    for (key, seqs), batch in itertools.product(by_key.items(), done):
        first, stop = bisect_right(seqs, batch.start), bisect_right(seqs, batch.end)
        if batch.listed and first < stop:
            superseded += [(key, seq) for seq in seqs[first : stop - 1] if seq in read]
            first = stop - 1
        for i in range(first, stop):
            if seqs[i] in read:
                continue
            later = seqs[i + 1 : bisect_right(seqs, batch.known)]
            kept = 1 if batch.listed else history
            contents = [known[seq][1] for seq in later]
            since = bisect_right(told, batch.known) - bisect_right(told, seqs[i])
            contents += unsure.get(key, [])[: batch.known - seqs[i] - since]
            if Marker.PURGE not in contents and not 0 < kept <= len(contents):
                missing.append((key, seqs[i]))
    assert not superseded, f"{len(superseded)} revisions that a list has not: {superseded[:10]}"
    assert not missing, f"{len(missing)} acknowledged writes were not read: {missing[:10]}"


def _unsure(
    attempted: Attempted, known: Iterable[tuple[str, Content | None]]
) -> dict[str, list[Content]]:
    """By key, what was neither acknowledged nor read; its PURGEs first."""
    found: dict[str, list[Content]] = {}
    for key, content in (attempted - Counter(known)).elements():
        found.setdefault(key, []).append(content)
    for contents in found.values():
        contents.sort(key=lambda content: content is not Marker.PURGE)
    return found
