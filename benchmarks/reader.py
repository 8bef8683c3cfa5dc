"""How fast is one reader? A range of a bucket into Arrow, against a bare socket.

``python -m benchmarks.reader [--quick] [--json FILE] [--size 128 ...] [--rounds 5]``

For every size of value, with and without headers, a fresh bucket on a fresh server is filled. Then
in turns, several rounds: the bare socket (a push consumer whose bytes are received into one buffer
and counted, nothing is parsed) and the reader (``OrderedReader`` and the rows of ``nats_kv``; the
record batches are counted and dropped). Server and reader share the cores. The ratio is that of
the medians; both sides' CPU time a row shows where it comes from.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import Machine, Stopwatch, machine
from benchmarks.raw import Message, drain, fill
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.connection import ConnectionSettings
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.range_request import RangeRequest
from nats_stream_source.source.rows import kv_rows
from nats_stream_source.source.runtime import Runner

SIZES = (16, 128, 1024, 16384)
_KEYS = 100_000
_MOST_BYTES = 400 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over the stream: rows a second, and CPU nanoseconds a row of both processes."""

    rate: float
    own_cpu: float
    server_cpu: float


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of the rounds for one kind of message."""

    size: int
    headers: bool
    rows: int
    bare: Run
    reader: Run
    rounds: list[float]

    @property
    def ratio(self) -> float:
        """Reader ÷ bare socket, of the medians."""
        return self.reader.rate / self.bare.rate

    @property
    def cpu_ratio(self) -> float:
        """The ratio where both cores are full: by CPU of both processes, whatever ran besides."""
        bare, reader = self.bare, self.reader
        return (bare.own_cpu + bare.server_cpu) / (reader.own_cpu + reader.server_cpu)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"ratio": self.ratio, "cpu_ratio": self.cpu_ratio}


def measure(size: int, headers: bool, rounds: int, rows: int) -> Result:
    """Fill a bucket and read it ``rounds`` times in each way, alternately.

    Args:
        size: bytes of every value.
        headers: whether every message has a header.
        rows: how many messages; fewer where the values are large.
    """
    rows = min(rows, _MOST_BYTES // (size + 120))
    with NatsServer() as server:
        stream, created = _fill(server, size, headers, rows)
        expected = drain(server.port, stream, rows)
        bare: list[Run] = []
        reader: list[Run] = []
        runner = Runner(ConnectionSettings(servers=(server.url,)))
        try:
            _read(runner, stream, created, rows)  # what is made once: connection, imports
            for _ in range(rounds):
                with Stopwatch(server.pid) as watch:
                    drain(server.port, stream, rows, expected)
                bare.append(_run(watch, rows))
                with Stopwatch(server.pid) as watch:
                    _read(runner, stream, created, rows)
                reader.append(_run(watch, rows))
        finally:
            runner.close()
    pairs = [one.rate / other.rate for one, other in zip(reader, bare, strict=True)]
    return Result(size, headers, rows, _median(bare), _median(reader), pairs)


def _run(watch: Stopwatch, rows: int) -> Run:
    return Run(rows / watch.wall, watch.own_cpu / rows * 1e9, watch.other_cpu / rows * 1e9)


def _median(runs: Sequence[Run]) -> Run:
    return Run(*(statistics.median(getattr(run, name) for run in runs) for name in Run.__slots__))


def _fill(server: NatsServer, size: int, headers: bool, rows: int) -> tuple[str, str]:
    async def create() -> str:
        link = Link(ConnectionSettings(servers=(server.url,)))
        try:
            config = {
                "name": "KV_bench",
                "subjects": ["$KV.bench.>"],
                "max_msgs_per_subject": 64,
                "allow_direct": True,
                "allow_rollup_hdrs": True,
            }
            answer = await JetStream(await link.connection()).call("STREAM.CREATE.KV_bench", config)
            return str(answer["created"])
        finally:
            await link.drop()

    created = asyncio.run(create())
    fill(server.port, _messages(size, headers, rows))
    return "KV_bench", created


def _messages(size: int, headers: bool, rows: int) -> Iterator[Message]:
    # Bytes of all kinds, line ends too: text without them would be easier to cut than real values.
    values = [random.Random(i).randbytes(size) for i in range(64)]
    for i in range(rows):
        block = b"NATS/1.0\r\nNats-Expected-Stream: KV_bench\r\nTrace: %012d\r\n\r\n" % i
        yield f"$KV.bench.key.{i % _KEYS}", block if headers else b"", values[i % 64]


def _read(runner: Runner, stream: str, created: str, rows: int) -> None:
    request = RangeRequest(stream=stream, created=created, start=0, end=rows)
    reader = OrderedReader(runner.link, request)
    count = 0
    for frames in runner.iterate(reader.batches()):
        batch = kv_rows(
            frames,
            bucket="bench",
            prefix="$KV.bench.",
            stream_created=created,
            initial_through=0,
            meta_only=False,
            ignore_deletes=False,
        )
        count += batch.num_rows
    if count != rows or reader.cursor.rebuilds:
        raise RuntimeError(f"{count} rows of {rows}: {reader!r}")


def table(results: Sequence[Result]) -> Table:
    """The results for a terminal."""
    shown = Table(
        "value",
        "headers",
        "rows",
        "bare socket",
        "reader",
        "ratio",
        "rounds",
        "by CPU",
        "CPU ns/row",
    )
    for one in results:
        shown.add_row(
            f"{one.size:,} B",
            "yes" if one.headers else "no",
            f"{one.rows:,}",
            f"{one.bare.rate:,.0f}/s",
            f"{one.reader.rate:,.0f}/s",
            f"{one.ratio:.2f}",
            f"{min(one.rounds):.2f} to {max(one.rounds):.2f}",
            f"{one.cpu_ratio:.2f}",
            f"{one.bare.own_cpu:.0f}+{one.bare.server_cpu:.0f}, "
            f"{one.reader.own_cpu:.0f}+{one.reader.server_cpu:.0f}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON if asked for; the last line is the 128-byte ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="128 bytes only, few rounds")
    parser.add_argument("--size", type=int, action="append", help="bytes of a value (repeatable)")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--headers", choices=["no", "yes", "both"], default="both")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    sizes = given.size or ([128] if given.quick else SIZES)
    rounds = given.rounds or (3 if given.quick else 7)
    rows = min(given.rows, 200_000) if given.quick else given.rows
    kinds = {"no": [False], "yes": [True], "both": [False, True]}[given.headers]
    console = Console()
    place: Machine = machine()
    console.print(str(place), highlight=False)
    began = time.perf_counter()
    results = [measure(size, headers, rounds, rows) for size in sizes for headers in kinds]
    console.print(table(results))
    console.print(
        f"CPU: own + server's, of the bare socket and of the reader; "
        f"{time.perf_counter() - began:.0f} s in all",
        highlight=False,
    )
    if given.json is not None:
        outcome = {"machine": place.as_dict(), "reader": [one.as_dict() for one in results]}
        given.json.write_text(json.dumps(outcome, indent=1) + "\n")
    for one in results:
        if one.size == 128 and not one.headers:
            print(f"reader / bare socket, 128 B: {one.ratio:.2f}")


if __name__ == "__main__":
    main()
