"""What is there at the end: the streams' messages, the sinks' rows, the driver's events.

The streams are read with nats-py's pull consumers, not with this package.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
from buckets import connected
from deltalake import DeltaTable
from loops import run
from nats.js.api import AckPolicy, ConsumerConfig

from nats_stream_source.rebuilds import rebuilds_in
from soak.ledger import DEL, PURGE, PUT, Write, read_ledger
from soak.oracle import Entry, Evidence
from soak.servers import BUCKETS, PREFIXES, STREAMS

_BATCH = 1000
PASSING = (
    "ConnectError",
    "RequestTimeoutError",
    "AckTimeoutError",
    "ConsumerLostError",
    "MinLastSequenceError",
    "JetStreamNotEnabledError",
    "ApiError",
)
"""Failures that a query may end with while servers are away; a supervisor starts it again."""

STARVED = ("failed to connect back", "CANNOT_OPEN_SOCKET")
"""What Spark says where a Python worker does not start within 10 s: the machine is too busy."""

LOSS = "DataLossError"


def gather(url: str, directory: Path, seen: Events) -> Evidence:
    """All that the oracle compares; the servers must be healthy, and nobody writes any more."""
    writes: dict[str, list[Write]] = {place: [] for place in STREAMS}
    for write in read_ledger(directory / "ledger.tsv"):
        writes[write.place].append(write)
    versions = [None] if seen.reconciled is None else [None, seen.reconciled]
    return Evidence(
        writes=writes,
        held={place: held(url, place) for place in STREAMS},
        attempts={place: attempts(directory, place) for place in ("full", "stream")},
        tables=[table_rows(directory, version) for version in versions],
        buckets=frozenset(BUCKETS),
        stopped=set(seen.lost),
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
                seq = message.metadata.sequence.stream
                entries.append(Entry(seq, message.subject[prefix:], operation, value))
        left = (await pull.consumer_info()).num_pending
        if left and (not entries or entries[-1].seq < last):
            raise RuntimeError(f"{left} messages of {stream} could not be read")
        await pull.unsubscribe()
        return entries


def attempts(directory: Path, place: str) -> dict[int, list[list[Entry]]]:
    """By batch id, the rows of each whole attempt, in the order in which they were made."""
    found: dict[int, list[list[Entry]]] = {}
    for batch in sorted((directory / place).glob("[0-9]*")):
        tries = sorted(one.parent for one in batch.glob("*/_SUCCESS"))
        if tries:
            found[int(batch.name)] = [_rows(one, place) for one in tries]
    return found


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
        failures: by kind of error, of queries that failed and were started again.
        unexpected: texts of failures that nothing done here explains.
        lost: queries that stopped with DataLossError, with its text.
        ends: by query, the last sequence of the last micro-batch.
        starts: how many drivers came to have a session.
        reconciled: the version of the table before it was reconciled; None when it was not.
    """

    batches: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    reconciled: int | None = None


def events(path: Path) -> Events:
    """Read ``events.jsonl``."""
    found = Events()
    for line in _whole_lines(path):
        event = json.loads(line)
        name, query = event["event"], event.get("query", "")
        if name == "batch":
            found.batches[query] += 1
            found.rows[query] += event["rows"]
            found.ends[query] = event["end"]
        elif name == "failed":
            _failure(found, query, event["text"])
        elif name == "started":
            found.starts += 1
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
        elif (own and event["event"] == "batch") or LOSS in event.get("text", ""):
            seen.add(event["query"])
    return own and len(seen) == len(STREAMS)


def _failure(found: Events, query: str, text: str) -> None:
    if LOSS in text:
        found.lost[query] = text
        return
    for kind in PASSING:
        if f"{kind}:" in text:
            found.failures[kind] += 1
            return
    if any(words in text for words in STARVED):
        found.failures["worker not started"] += 1
        return
    found.failures["unexpected"] += 1
    found.unexpected.append(f"{query}: {text[-1500:]}")


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
