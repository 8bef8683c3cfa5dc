"""Methods to read a small range, such as a micro-batch at a bucket's end.

``python -m benchmarks.small_reads [--quick] [--json FILE]``

The benchmark puts a few entries, then reads their range in turn with

``consumer``      an ordered consumer, as the split reader;
``direct``        one Direct Get for a batch from the range's first sequence (ADR-31);
``by sequence``   the leader's ``STREAM.MSG.GET`` for each sequence of the range, all in flight;
``next``          the leader's ``STREAM.MSG.GET`` for the next message, one after the other.

Each runs without a filter and with a filter that matches every entry (``next`` and ``direct``
require a subject; ``by sequence`` does not support one). The figures are median milliseconds on an
open connection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.microbatch import Bucket, benchmark_buckets
from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.machine import OtherProcesses, cpu_seconds, machine
from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.direct_get.request import send_request
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.reusable_connection import ReusableConnection

SPANS = (1, 10, 100, 1000)
_STREAM = "KV_bench"
_ALL = "$KV.bench.>"


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds at the median, and the server's CPU milliseconds, of one method."""

    bucket: Bucket
    place: str
    span: int
    way: str
    ms: float
    server_ms: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


async def measure(
    bucket: Bucket, rounds: int, spans: Sequence[int] = SPANS
) -> tuple[list[Result], dict[str, float]]:
    """Fill a bucket, then read ranges of ``spans`` sequences at its end and in its middle."""
    with NatsServer() as server, OtherProcesses() as others:
        pairs = entries(bucket.writes, bucket.keys, scattered=bucket.writes > bucket.keys)
        fill_bucket(server.port, "bench", pairs, history=1)
        link = ReusableConnection(ConnectionSettings(servers=(server.url,)))
        try:
            jetstream = JetStream(await link.connection())
            results: list[Result] = []
            for place in ("end", "middle"):
                for span in spans:
                    results += await _span(link, jetstream, server.pid, bucket, place, span, rounds)
        finally:
            await link.drop()
    return results, others.as_dict()


async def _span(
    link: ReusableConnection,
    jetstream: JetStream,
    pid: int,
    bucket: Bucket,
    place: str,
    span: int,
    rounds: int,
) -> list[Result]:
    times: dict[str, list[float]] = {}
    cpu: dict[str, float] = {}
    client = jetstream.connection.client.jetstream()
    for _ in range(rounds):
        created = (info := await jetstream.stream_info(_STREAM)).created
        end = info.last_seq
        if place == "end":
            # What a micro-batch finds: fresh entries.
            acks = [
                await client.publish_async(f"$KV.bench.new.{i}", b"v" * 128) for i in range(span)
            ]
            end = max(ack.seq for ack in await asyncio.gather(*acks))
        else:
            middle = await jetstream.message(
                _STREAM, seq=(info.first_seq + info.last_seq) // 2, next_by_subj=_ALL
            )
            assert middle is not None
            end = middle.seq
        start = end - span
        counts = {}
        for way, read in _ways(link, jetstream, created, start, end).items():
            before, began = cpu_seconds(pid), time.perf_counter()
            counts[way] = await read()
            times.setdefault(way, []).append((time.perf_counter() - began) * 1000)
            cpu[way] = cpu.get(way, 0.0) + (cpu_seconds(pid) - before) * 1000
        if len(set(counts.values())) != 1:
            raise RuntimeError(f"not all ways read the same: {counts}")
    return [
        Result(bucket, place, span, way, statistics.median(ms), cpu[way] / rounds)
        for way, ms in times.items()
    ]


def _ways(
    link: ReusableConnection, jetstream: JetStream, created: str, start: int, end: int
) -> dict[str, Callable[[], Awaitable[int]]]:
    return {
        "consumer": lambda: _consumer(link, created, start, end, ()),
        "consumer, filter": lambda: _consumer(link, created, start, end, (_ALL,)),
        "direct": lambda: _direct(jetstream, start, end, None),
        "direct, filter": lambda: _direct(jetstream, start, end, _ALL),
        "by sequence": lambda: _by_sequence(jetstream, start, end),
        "next, filter": lambda: _next(jetstream, start, end),
    }


async def _consumer(
    link: ReusableConnection, created: str, start: int, end: int, filters: tuple[str, ...]
) -> int:
    request = RangeRequest(stream=_STREAM, created=created, start=start, end=end, filters=filters)
    count = 0
    async for frames in OrderedReader(link, request).batches():
        count += len(frames)
    return count


async def _direct(jetstream: JetStream, start: int, end: int, subject: str | None) -> int:
    request: dict[str, Any] = {"seq": start + 1, "batch": end - start}
    if subject is not None:
        request["next_by_subj"] = subject
    reply = await send_request(jetstream.connection, f"DIRECT.GET.{_STREAM}", request)
    return sum(start < message.seq <= end for message in reply.page.messages())


async def _by_sequence(jetstream: JetStream, start: int, end: int) -> int:
    messages = await asyncio.gather(
        *(jetstream.message(_STREAM, seq=seq) for seq in range(start + 1, end + 1))
    )
    return sum(message is not None for message in messages)


async def _next(jetstream: JetStream, start: int, end: int) -> int:
    count = 0
    while start < end:
        message = await jetstream.message(_STREAM, seq=start + 1, next_by_subj=_ALL)
        if message is None or message.seq > end:
            break
        start = message.seq
        count += 1
    return count


def table(results: Sequence[Result]) -> Table:
    """The results for a terminal."""
    ways = list(dict.fromkeys(one.way for one in results))
    shown = Table("keys", "holes", "where", "sequences", *(f"{way}, ms" for way in ways))
    rows: dict[tuple[Bucket, str, int], dict[str, float]] = {}
    for one in results:
        rows.setdefault((one.bucket, one.place, one.span), {})[one.way] = one.ms
    for (bucket, place, span), found in rows.items():
        cells = (f"{found[way]:.1f}" for way in ways)
        shown.add_row(f"{bucket.keys:,}", f"{bucket.holes:.0%}", place, f"{span:,}", *cells)
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a tenth of the keys")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    buckets = benchmark_buckets(options.quick)
    console = Console(highlight=False)
    host = machine()
    console.print(str(host))
    results: list[Result] = []
    others = {}
    for bucket in buckets:
        found, others[f"{bucket.keys:,} keys"] = asyncio.run(measure(bucket, options.rounds))
        results += found
    console.print(table(results))
    if options.json is not None:
        shown = {
            "machine": host.as_dict(),
            "others": others,
            "small_reads": [one.as_dict() for one in results],
        }
        options.json.write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    main()
