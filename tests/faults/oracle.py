"""Were the rows that were read what was written? Pure.

``acknowledged`` has what was written, by sequence; ``attempted`` all values, and all markers with
their keys, also those whose PubAck did not come: they may be there or not.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence

from faults.reading import MicroBatch
from faults.rows import Marker, Row, Written

Attempted = Collection[bytes | Written]


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
            unsure = (key, content) if isinstance(content, Marker) else content
            assert unsure in attempted, f"never written: {row}"
    values = [row.value for row in rows if row.operation == "PUT"]
    again = len(values) - len(set(values))
    assert not again, f"{again} values were read at two sequences"


def check_all_came(
    rows: Sequence[Row],
    acknowledged: Mapping[int, Written],
    history: int,
    done: Sequence[MicroBatch],
) -> None:
    """Each revision that its micro-batch could still find; of a list, each key's last one only.

    A revision goes away by as many later ones of its key as the bucket keeps, or by a PURGE. That
    is an excuse where they were written before its micro-batch was done, and else it is not.

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
            purged = any(known[seq][1] is Marker.PURGE for seq in later)
            if not purged and not 0 < kept <= len(later):
                missing.append((key, seqs[i]))
    assert not superseded, f"{len(superseded)} revisions that a list has not: {superseded[:10]}"
    assert not missing, f"{len(missing)} acknowledged writes were not read: {missing[:10]}"
