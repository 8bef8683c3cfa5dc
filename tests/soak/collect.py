"""Collects the evidence at the end: messages of the streams, rows of the sinks, driver events."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable

from tests.soak.servers import BUCKETS, PREFIXES, STREAMS
from tests.support.delta import rows_of
from tests.support.log_fields import parse_fields
from tests.support.nats.stored import stored_entries
from tests.support.oracle import query_failures
from tests.support.oracle.evidence import (
    PUT,
    Entry,
    Evidence,
    QueryProgress,
    Rollback,
    Write,
    read_ledger,
)

STALLED = 300.0
"""Seconds without a micro-batch; on a busy machine a micro-batch may take minutes."""


def collect_evidence(
    url: str, directory: Path, events: Events, rollback: Rollback | None = None
) -> Evidence:
    """Everything that the oracle compares; servers must be healthy and writers stopped."""
    writes: dict[str, list[Write]] = {source: [] for source in STREAMS}
    for write in read_ledger(directory / "ledger.tsv"):
        writes[write.source].append(write)
    messages = {
        source: stored_entries(url, stream, PREFIXES[source]) for source, stream in STREAMS.items()
    }
    messages_read_at = time.time()
    tries = {source: attempts(directory, source) for source in ("full", "stream")}
    return Evidence(
        writes=writes,
        messages=messages,
        messages_read_at=messages_read_at,
        attempts=tries,
        table=table_rows(directory, events.reconciled),
        reconciled=None if events.reconciled is None else table_rows(directory),
        reconciled_at=events.reconciled_at,
        buckets=frozenset(BUCKETS),
        progress={
            source: QueryProgress(
                committed(directory, source),
                tuple(events.reported_at.get(source, ())),
                completed(directory, source, tries.get(source, {})),
            )
            for source in STREAMS
        },
        stopped=set(events.lost),
        rollback=rollback,
    )


def attempts(directory: Path, source: str) -> dict[int, list[list[Entry]]]:
    """By batch id, the rows of each complete attempt, in order of time."""
    rows: dict[int, list[list[Entry]]] = {}
    for batch in sorted((directory / source).glob("[0-9]*")):
        if tries := complete_attempts(batch):
            rows[int(batch.name)] = [_rows(attempt, source) for attempt in tries]
    return rows


def complete_attempts(batch: Path) -> list[Path]:
    """The directories of the complete attempts of a micro-batch, in order of time."""
    return sorted(marker.parent for marker in batch.glob("*/_SUCCESS"))


def completed(
    directory: Path, source: str, tries_by_batch: dict[int, list[list[Entry]]]
) -> tuple[tuple[int, float], ...]:
    """:attr:`QueryProgress.completed`, from the result of :func:`attempts`."""
    result = []
    for number, tries in sorted(tries_by_batch.items()):
        last = max((row.seq for rows in tries for row in rows), default=0)
        attempt = complete_attempts(directory / source / f"{number:08d}")[-1]
        if last:
            result.append((last, (attempt / "_SUCCESS").stat().st_mtime))
    return tuple(result)


def committed(directory: Path, source: str) -> int:
    """The last sequence of the last micro-batch that a query committed; 0 without one."""
    checkpoint = directory / "checkpoints" / source
    commits = (int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
    number = max(commits, default=None)
    if number is None:
        return 0
    # Spark writes a line with its version and one with settings before the offset.
    offset = (checkpoint / "offsets" / str(number)).read_text().strip().rpartition("\n")[2]
    return int(json.loads(offset)["stream_seq"])


def _rows(directory: Path, source: str) -> list[Entry]:
    names = ["revision", "key", "operation", "value"]
    if source == "stream":
        names = ["sequence", "subject", "data"]
    rows: list[Entry] = []
    for part in sorted(directory.glob("part-*")):  # ordered by partition number
        table = pq.ParquetFile(part).read()
        created = table["stream_created"].cast("int64").to_pylist()
        for *values, when in zip(
            *(table[name].to_pylist() for name in names), created, strict=True
        ):
            if source == "stream":
                seq, subject, data = values
                values = [seq, subject.removeprefix(PREFIXES[source]), PUT, data]
            rows.append(Entry(*values, created=when))
    return rows


def table_rows(directory: Path, version: int | None = None) -> list[Entry]:
    return [
        Entry(row["revision"], row["key"], row["operation"], row["value"])
        for row in rows_of(DeltaTable(directory / "table", version=version))
        if row["operation"] == PUT
    ]


@dataclass
class Events:
    """The events of all drivers.

    Attributes:
        batches, rows: by query, the number of reported micro-batches and their rows.
        reported_at: by query, the times of these reports, and of the end of reading.
        failures: by kind of error, failures of queries that were restarted.
        unexpected: texts of failures that the faults do not explain.
        stalls: a text for each query that finished no micro-batch for :data:`STALLED` seconds while
            its driver ran and other queries reported.
        lost: queries that stopped with DataLossError, with its text.
        lost_at: when they stopped.
        ends: by query, the last sequence of the last micro-batch.
        starts: how many drivers created a session.
        serial: number of the last driver with a session.
        reading: queries that finished a micro-batch in that session, or stopped for data loss.
        reconciled: version of the table before ``reconcile``; None if it did not run.
        reconciled_at: when ``reconcile`` started.
    """

    batches: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    reported_at: dict[str, list[float]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    stalls: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    lost_at: dict[str, float] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    serial: int = 0
    reading: set[str] = field(default_factory=set)
    reconciled: int | None = None
    reconciled_at: float = 0.0


def read_events(path: Path) -> Events:
    events = Events()
    waiting: dict[str, float] = {}  # by query, when it last finished a micro-batch or was started
    for event in _events(path):
        name, query, at = event["event"], event.get("query", ""), event["at"]
        if name == "started":
            events.starts += 1
            events.serial = event["serial"]
            events.reading = set(events.lost)
            waiting = dict.fromkeys(STREAMS.keys() - events.lost.keys(), at)
        for stalled in [one for one, since in waiting.items() if at - since > STALLED]:
            del waiting[stalled]
            events.stalls.append(f"{stalled}: no micro-batch after {events.batches[stalled]}")
        if name in ("batch", "done"):
            events.reported_at.setdefault(query, []).append(at)
            waiting.pop(query, None)
        if name == "batch":
            events.batches[query] += 1
            events.rows[query] += event["rows"] or 0  # unknown by stream
            events.ends[query] = event["end"]
            events.reading.add(query)
            if query in STREAMS:
                waiting[query] = at
        elif name == "failed":
            _add_failure(events, query, event)
            if query in events.lost:
                waiting.pop(query, None)
        elif name == "reconciling":
            events.reconciled_at = at
        elif name == "reconciled":
            events.reconciled = event["before"]
    return events


def _add_failure(events: Events, query: str, event: dict[str, Any]) -> None:
    kind = query_failures.kind_of(event["text"])
    if kind == query_failures.DATA_LOSS:
        events.lost[query] = query_failures.last_raised(event["text"]).message
        events.lost_at.setdefault(query, event["at"])
        events.reading.add(query)
        return
    events.failures[kind] += 1
    if kind == query_failures.UNEXPECTED:
        events.unexpected.append(
            f"{query}: {event['text'].partition(query_failures.QUERY_DESCRIPTION)[0][-3000:]}"
        )


def _events(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    yield from (json.loads(line) for line in lines if line.strip())


def rebuilds(logs: Iterable[Path]) -> Counter[str]:
    """How often consumers were rebuilt, by reason, in all logs of drivers."""
    counts: Counter[str] = Counter()
    for path in logs:
        with path.open(errors="replace") as lines:
            for line in lines:
                _, rebuilt, rest = line.partition("consumer rebuilt ")
                fields = parse_fields(rest) if rebuilt else {}
                # The last line of a killed process may be incomplete.
                if "stream" in fields and "reason" in fields:
                    counts[fields["reason"]] += 1
    return counts
