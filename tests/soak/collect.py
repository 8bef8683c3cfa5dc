"""Collects the evidence at the end: messages of the streams, rows of the sinks, driver events.

The streams are read with pull consumers of nats-py, not with this package.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable
from nats.js.api import AckPolicy, ConsumerConfig

from tests.soak.servers import BUCKETS, COPY, COPY_PREFIX, PREFIXES, STREAMS
from tests.support.delta import rows_of
from tests.support.event_loop import run
from tests.support.log_fields import parse_fields
from tests.support.nats.buckets import connected
from tests.support.oracle import query_failures
from tests.support.oracle.evidence import Entry, Evidence, QueryProgress, Rollback
from tests.support.oracle.ledger import DEL, PURGE, PUT, Write, read_ledger

_BATCH = 1000


def collect_evidence(
    url: str, directory: Path, events: Events, rollback: Rollback | None = None
) -> Evidence:
    """Everything that the oracle compares; servers must be healthy and writers stopped."""
    writes: dict[str, list[Write]] = {source: [] for source in STREAMS}
    for write in read_ledger(directory / "ledger.tsv"):
        writes[write.source].append(write)
    messages = {source: stream_messages(url, source) for source in STREAMS}
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


def stream_messages(url: str, source: str) -> list[Entry]:
    """All messages of a stream, in order."""
    return messages_of(url, STREAMS[source], PREFIXES[source])


def copied_messages(url: str) -> list[Entry]:
    """All messages that the query ``copy`` has written, in order."""
    return messages_of(url, COPY, COPY_PREFIX)


def messages_of(url: str, stream: str, prefix: str) -> list[Entry]:
    """All messages of a stream, in order; their keys are the subjects without ``prefix``."""
    return run(_stream_messages(url, stream, len(prefix)))


async def _stream_messages(url: str, stream: str, prefix: int) -> list[Entry]:
    async with connected(url) as client:
        jetstream = client.jetstream()
        last = (await jetstream.stream_info(stream)).state.last_seq
        if not last:
            return []
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE,
            num_replicas=1,
            mem_storage=True,
            # On a busy machine two requests may be more than the default of 5 s apart.
            inactive_threshold=600,
        )
        pull = await jetstream.pull_subscribe("", stream=stream, config=config)
        entries: list[Entry] = []
        while not entries or entries[-1].seq < last:
            try:
                messages = await pull.fetch(_BATCH, timeout=5)
            except asyncio.TimeoutError:
                break  # the last messages expired, or were superseded
            for message in messages:
                headers = message.headers or {}
                operation = headers.get("KV-Operation", PUT)
                if headers.get("Nats-Marker-Reason") in ("MaxAge", "Purge"):
                    operation = PURGE
                elif headers.get("Nats-Marker-Reason") == "Remove":
                    operation = DEL
                value = message.data if operation == PUT else None
                seq, at = message.metadata.sequence.stream, message.metadata.timestamp.timestamp()
                entries.append(Entry(seq, message.subject[prefix:], operation, value, at=at))
        pending = (await pull.consumer_info()).num_pending
        if pending and (not entries or entries[-1].seq < last):
            raise RuntimeError(f"could not read {pending} messages of {stream}")
        await pull.unsubscribe()
        return entries


def attempts(directory: Path, source: str) -> dict[int, list[list[Entry]]]:
    """By batch id, the rows of each complete attempt, in order of time."""
    rows: dict[int, list[list[Entry]]] = {}
    for batch in sorted((directory / source).glob("[0-9]*")):
        if tries := _complete_attempts(batch):
            rows[int(batch.name)] = [_rows(attempt, source) for attempt in tries]
    return rows


def _complete_attempts(batch: Path) -> list[Path]:
    return sorted(marker.parent for marker in batch.glob("*/_SUCCESS"))


def completed(
    directory: Path, source: str, tries_by_batch: dict[int, list[list[Entry]]]
) -> tuple[tuple[int, float], ...]:
    """:attr:`QueryProgress.completed`, from the result of :func:`attempts`."""
    result = []
    for number, tries in sorted(tries_by_batch.items()):
        last = max((row.seq for rows in tries for row in rows), default=0)
        ended_at = (
            (_complete_attempts(directory / source / f"{number:08d}")[-1] / "_SUCCESS")
            .stat()
            .st_mtime
        )
        if last:
            result.append((last, ended_at))
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
    rows: list[Entry] = []
    for part in sorted(directory.glob("part-*")):  # ordered by partition number
        table = pq.ParquetFile(part).read()
        if source == "stream":
            prefix = len(PREFIXES[source])
            columns = [table[name].to_pylist() for name in ("sequence", "subject", "data")]
            created = table["stream_created"].cast("int64").to_pylist()
            rows += [
                Entry(seq, subject[prefix:], PUT, data, when)
                for seq, subject, data, when in zip(*columns, created, strict=True)
            ]
        else:
            names = ("revision", "key", "operation", "value")
            columns = [table[name].to_pylist() for name in names]
            created = table["stream_created"].cast("int64").to_pylist()
            rows += [Entry(*values) for values in zip(*columns, created, strict=True)]
    return rows


def table_rows(directory: Path, version: int | None = None) -> list[Entry]:
    """The rows of the Delta table, read by delta-rs."""
    table = DeltaTable(str(directory / "table"), version=version)
    rows = rows_of(table)
    return [
        Entry(row["revision"], row["key"], row["operation"], row["value"])
        for row in rows
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
        lost: queries that stopped with DataLossError, with its text.
        lost_at: when they stopped.
        ends: by query, the last sequence of the last micro-batch.
        starts: how many drivers created a session.
        serial: number of the last driver with a session.
        reconciled: version of the table before ``reconcile``; None if it did not run.
        reconciled_at: when ``reconcile`` started.
    """

    batches: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    reported_at: dict[str, list[float]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    lost_at: dict[str, float] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    serial: int = 0
    reconciled: int | None = None
    reconciled_at: float = 0.0


def read_events(path: Path) -> Events:
    """Read ``events.jsonl``."""
    events = Events()
    for line in _complete_lines(path):
        event = json.loads(line)
        name, query = event["event"], event.get("query", "")
        if name in ("batch", "done"):
            events.reported_at.setdefault(query, []).append(event["at"])
        if name == "batch":
            events.batches[query] += 1
            events.rows[query] += event["rows"] or 0  # unknown by stream
            events.ends[query] = event["end"]
        elif name == "failed":
            _add_failure(events, query, event)
        elif name == "started":
            events.starts += 1
            events.serial = event["serial"]
        elif name == "reconciling":
            events.reconciled_at = event["at"]
        elif name == "reconciled":
            events.reconciled = event["before"]
    return events


def is_reading(path: Path, serial: int) -> bool:
    """Whether each query of this driver finished a micro-batch, or stopped for data loss before."""
    reading: set[str] = set()
    own = False
    for line in _complete_lines(path):
        event = json.loads(line)
        if event["event"] == "started":
            own = event["serial"] == serial
        elif (own and event["event"] == "batch") or query_failures.is_data_loss(
            event.get("text", "")
        ):
            reading.add(event["query"])
    return own and reading >= STREAMS.keys()


def _add_failure(events: Events, query: str, event: dict[str, Any]) -> None:
    kind = query_failures.kind_of(event["text"])
    if kind == query_failures.DATA_LOSS:
        events.lost[query] = query_failures.last_raised(event["text"]).message
        events.lost_at.setdefault(query, event["at"])
        return
    events.failures[kind] += 1
    if kind == query_failures.UNEXPECTED:
        events.unexpected.append(
            f"{query}: {event['text'].partition(query_failures.QUERY_DESCRIPTION)[0][-3000:]}"
        )


def _complete_lines(path: Path) -> Iterable[str]:
    if path.exists():
        yield from (line for line in path.read_text().split("\n")[:-1] if line.strip())


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
