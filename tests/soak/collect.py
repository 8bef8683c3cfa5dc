"""What is there at the end: the streams' messages, the sinks' rows, the driver's events.

The streams are read with nats-py's pull consumers, not with this package.
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
from buckets import connected
from deltalake import DeltaTable
from loops import run
from nats.js.api import AckPolicy, ConsumerConfig

from nats_stream_source.rebuilds import rebuilds_in
from soak import failures
from soak.findings import Entry, Evidence, Loss, Reading
from soak.ledger import DEL, PURGE, PUT, Write, read_ledger
from soak.servers import BUCKETS, PREFIXES, STREAMS

_BATCH = 1000


def gather(url: str, directory: Path, seen: Events, loss: Loss | None = None) -> Evidence:
    """All that the oracle compares; the servers must be healthy, and nobody writes any more."""
    writes: dict[str, list[Write]] = {place: [] for place in STREAMS}
    for write in read_ledger(directory / "ledger.tsv"):
        writes[write.place].append(write)
    messages = {place: held(url, place) for place in STREAMS}
    held_at = time.time()
    tries = {place: attempts(directory, place) for place in ("full", "stream")}
    return Evidence(
        writes=writes,
        held=messages,
        held_at=held_at,
        attempts=tries,
        table=table_rows(directory, seen.reconciled),
        reconciled=None if seen.reconciled is None else table_rows(directory),
        reconciled_at=seen.reconciled_at,
        buckets=frozenset(BUCKETS),
        readings={
            place: Reading(
                through(directory, place),
                tuple(seen.reports.get(place, ())),
                spans(directory, place, tries.get(place, {})),
            )
            for place in STREAMS
        },
        stopped=set(seen.lost),
        loss=loss,
    )


def held(url: str, place: str) -> list[Entry]:
    """All messages of a stream, in order."""
    return run(_held(url, STREAMS[place], len(PREFIXES[place])))


async def _held(url: str, stream: str, prefix: int) -> list[Entry]:
    async with connected(url) as client:
        jetstream = client.jetstream()
        last = (await jetstream.stream_info(stream)).state.last_seq
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE,
            num_replicas=1,
            mem_storage=True,
            # A busy machine may need longer between two requests than the server's five seconds.
            inactive_threshold=600,
        )
        pull = await jetstream.pull_subscribe("", stream=stream, config=config)
        entries: list[Entry] = []
        while not entries or entries[-1].seq < last:
            try:
                messages = await pull.fetch(_BATCH, timeout=5)
            except asyncio.TimeoutError:
                break  # the last ones are gone: expired, or superseded
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
        left = (await pull.consumer_info()).num_pending
        if left and (not entries or entries[-1].seq < last):
            raise RuntimeError(f"{left} messages of {stream} could not be read")
        await pull.unsubscribe()
        return entries


def attempts(directory: Path, place: str) -> dict[int, list[list[Entry]]]:
    """By batch id, the rows of each whole attempt, in the order in which they were made."""
    found: dict[int, list[list[Entry]]] = {}
    for batch in sorted((directory / place).glob("[0-9]*")):
        if tries := _whole(batch):
            found[int(batch.name)] = [_rows(one, place) for one in tries]
    return found


def _whole(batch: Path) -> list[Path]:
    return sorted(one.parent for one in batch.glob("*/_SUCCESS"))


def spans(
    directory: Path, place: str, found: dict[int, list[list[Entry]]]
) -> tuple[tuple[int, float], ...]:
    """What :class:`Reading` has of that name, of the attempts that were ``found``."""
    result = []
    for number, tries in sorted(found.items()):
        last = max((row.seq for rows in tries for row in rows), default=0)
        over = (_whole(directory / place / f"{number:08d}")[-1] / "_SUCCESS").stat().st_mtime
        if last:
            result.append((last, over))
    return tuple(result)


def through(directory: Path, place: str) -> int:
    """The last sequence of the last micro-batch that a query committed; 0 when it has none."""
    checkpoint = directory / "checkpoints" / place
    commits = (int(one.name) for one in (checkpoint / "commits").glob("[0-9]*"))
    number = max(commits, default=None)
    if number is None:
        return 0
    # Spark's has a line of its version and one of settings before; the offset is the last one.
    offset = (checkpoint / "offsets" / str(number)).read_text().strip().rpartition("\n")[2]
    return int(json.loads(offset)["stream_seq"])


def _rows(directory: Path, place: str) -> list[Entry]:
    rows: list[Entry] = []
    for part in sorted(directory.glob("part-*")):  # the number of the partition comes first
        table = pq.ParquetFile(part).read()
        if place == "stream":
            prefix = len(PREFIXES[place])
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
            rows += [Entry(*one) for one in zip(*columns, created, strict=True)]
    return rows


def table_rows(directory: Path, version: int | None = None) -> list[Entry]:
    """The rows of the Delta table, as delta-rs reads them."""
    table = DeltaTable(str(directory / "table"), version=version)
    rows = table.to_pyarrow_table(columns=["revision", "key", "operation", "value"]).to_pylist()
    return [
        Entry(row["revision"], row["key"], row["operation"], row["value"])
        for row in rows
        if row["operation"] == PUT
    ]


@dataclass
class Events:
    """What the drivers said.

    Attributes:
        batches, rows: by query, of the micro-batches that were reported.
        reports: by query, when they were, and when it said that it had read all.
        failures: by kind of error, of queries that failed and were started again.
        unexpected: texts of failures that nothing done here explains.
        lost: queries that stopped with DataLossError, with its text.
        lost_at: when they did.
        ends: by query, the last sequence of the last micro-batch.
        starts: how many drivers came to have a session.
        serial: of the last one that did.
        reconciled: the version of the table before it was reconciled; None when it was not.
        reconciled_at: when that began.
    """

    batches: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    reports: dict[str, list[float]] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    lost_at: dict[str, float] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    serial: int = 0
    reconciled: int | None = None
    reconciled_at: float = 0.0


def events(path: Path) -> Events:
    """Read ``events.jsonl``."""
    found = Events()
    for line in _whole_lines(path):
        event = json.loads(line)
        name, query = event["event"], event.get("query", "")
        if name in ("batch", "done"):
            found.reports.setdefault(query, []).append(event["at"])
        if name == "batch":
            found.batches[query] += 1
            found.rows[query] += event["rows"]
            found.ends[query] = event["end"]
        elif name == "failed":
            _failure(found, query, event)
        elif name == "started":
            found.starts += 1
            found.serial = event["serial"]
        elif name == "reconciling":
            found.reconciled_at = event["at"]
        elif name == "reconciled":
            found.reconciled = event["before"]
    return found


def lively(path: Path, serial: int) -> bool:
    """Whether each query of this driver has read something, or stopped for good before."""
    seen: set[str] = set()
    own = False
    for line in _whole_lines(path):
        event = json.loads(line)
        if event["event"] == "started":
            own = event["serial"] == serial
        elif (own and event["event"] == "batch") or failures.is_loss(event.get("text", "")):
            seen.add(event["query"])
    return own and len(seen) == len(STREAMS)


def _failure(found: Events, query: str, event: dict[str, Any]) -> None:
    kind = failures.kind_of(event["text"])
    if kind == failures.LOSS:
        found.lost[query] = failures.last_raised(event["text"]).message
        found.lost_at.setdefault(query, event["at"])
        return
    found.failures[kind] += 1
    if kind == failures.UNEXPECTED:
        found.unexpected.append(f"{query}: {event['text'].partition(failures.QUERY)[0][-3000:]}")


def _whole_lines(path: Path) -> Iterable[str]:
    if path.exists():
        yield from (line for line in path.read_text().split("\n")[:-1] if line.strip())


def rebuilds(logs: Iterable[Path]) -> Counter[str]:
    """How often consumers were rebuilt, by reason, over all logs of drivers."""
    found: Counter[str] = Counter()
    for path in logs:
        with path.open(errors="replace") as lines:
            for reasons in rebuilds_in(lines).values():
                found += reasons
    return found
