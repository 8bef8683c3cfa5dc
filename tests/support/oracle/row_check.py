"""What is written and the rows that are read, whatever their format, and their check by the oracle.

``acknowledged`` of a :class:`~tests.support.recorded_stream.RecordedStream` has the writes with a
PubAck, by sequence. ``attempted`` has all writes, also those without a PubAck: such a write may be
stored or not, and may have been superseded before it was read.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pyarrow as pa

from tests.support.nats import buckets
from tests.support.oracle.evidence import (
    PUT,
    Entry,
    Evidence,
    Findings,
    MicroBatchRange,
    QueryProgress,
    Write,
)
from tests.support.oracle.row_oracle import compare_rows


class Marker(Enum):
    """A removal of a key: what is written instead of a value."""

    DEL = "DEL"
    PURGE = "PURGE"


Value = bytes | Marker
Written = tuple[str, Value]
"""A key, and what is written to it."""

_HEADERS = {Marker.DEL: buckets.DEL, Marker.PURGE: buckets.PURGE}


def message(prefix: str, written: Written) -> buckets.Message:
    """The message that writes it."""
    key, content = written
    if isinstance(content, Marker):
        return prefix + key, b"", _HEADERS[content]
    return prefix + key, content, None


@dataclass(frozen=True, slots=True)
class Row:
    """A row, whatever the format calls its columns."""

    seq: int
    key: str
    value: bytes | None
    operation: str = "PUT"
    created: Any = None

    @property
    def written(self) -> tuple[str, Value | None]:
        """What was written, as this row has it; a marker's value must be null."""
        if self.operation == "PUT" or self.value is not None:
            return self.key, self.value
        return self.key, Marker(self.operation)


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    columns = batch.to_pydict()
    if "key" in columns:
        names = ("revision", "key", "value", "operation", "stream_created")
        return [Row(*values) for values in zip(*(columns[name] for name in names), strict=True)]
    rows = zip(
        columns["sequence"],
        columns["subject"],
        columns["data"],
        columns["stream_created"],
        strict=True,
    )
    return [Row(seq, subject.split(".", 1)[1], data, created=at) for seq, subject, data, at in rows]


Attempted = Counter[Written]

_SOURCE = "recorded"
_DELIVERED = ("read twice", "out of order", "not written")


def check_rows(
    rows: Sequence[Row], acknowledged: Mapping[int, Written], attempted: Attempted
) -> None:
    """Assert that each row is a write, once and in order of sequence."""
    _expect_none(_compare(rows, acknowledged, attempted), *_DELIVERED)


def check_all_read(
    rows: Sequence[Row],
    acknowledged: Mapping[int, Written],
    attempted: Attempted,
    *,
    after: int,
    through: int,
    lost: Iterable[int] = (),
) -> None:
    """Assert :func:`check_rows`, and that every write in ``(after, through]`` was read.

    Args:
        lost: sequences that the server lost, or that the test removed.
    """
    outside = {seq for seq in acknowledged if not after < seq <= through}
    not_required = frozenset(outside.union(lost))
    findings = _compare(rows, acknowledged, attempted, not_required=not_required)
    _expect_none(findings, *_DELIVERED, "not read")


def check_batches(
    rows: Sequence[Row],
    acknowledged: Mapping[int, Written],
    attempted: Attempted,
    history: int,
    batches: Sequence[MicroBatchRange],
) -> None:
    """Assert that each micro-batch read all revisions that it could still find.

    A micro-batch of last values must have the last revision of each key only.

    Args:
        history: how many revisions of a key the bucket keeps; -1 for any number.
        batches: all micro-batches, from the start on.
    """
    assert batches[0].start == 0
    adjacent = all(a.end == b.start for a, b in itertools.pairwise(batches))
    assert adjacent, "micro-batches are not adjacent"
    assert batches[-1].end >= max(acknowledged), "the last writes were not read"
    findings = _compare(rows, acknowledged, attempted, history=history, batches=batches)
    _expect_none(findings, "superseded", "not read")


def _compare(
    rows: Sequence[Row],
    acknowledged: Mapping[int, Written],
    attempted: Attempted,
    *,
    history: int = -1,
    batches: Sequence[MicroBatchRange] = (),
    not_required: frozenset[int] = frozenset(),
) -> Findings:
    numbers = itertools.count()
    writes = [_write(next(numbers), *written, seq) for seq, written in sorted(acknowledged.items())]
    unsure = attempted - Counter(acknowledged.values())
    writes += [_write(next(numbers), *written) for written in unsure.elements()]
    entries = [Entry(row.seq, row.key, row.operation, row.value) for row in rows]
    evidence = Evidence(
        writes={_SOURCE: writes},
        attempts={_SOURCE: {0: [entries]}},
        history={_SOURCE: history},
        progress={_SOURCE: QueryProgress(batches=tuple(batches))},
        not_required={_SOURCE: not_required},
    )
    return compare_rows(_SOURCE, evidence)


def _write(number: int, key: str, content: bytes | Marker, seq: int | None = None) -> Write:
    if isinstance(content, Marker):
        return Write(number, _SOURCE, key, content.value, seq=seq)
    return Write(number, _SOURCE, key, PUT, seq=seq, payload=content)


def _expect_none(findings: Findings, *kinds: str) -> None:
    for kind in kinds:
        count, examples = findings.counts[kind], findings.examples.get(kind, [])
        assert not count, f"{kind} ({count}): {'; '.join(examples[:10])}"
