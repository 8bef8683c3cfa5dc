"""The cost of planning: micro-batches of a large, mostly compacted bucket, and an idle query.

``python -m benchmarks.planner [--quick] [--json FILE] [--store DIRECTORY] [--rounds 20]``

The benchmark fills a bucket of 1,000,000 keys with 10,000,000 random overwrites (one revision per
key, so nine tenths of all sequences were removed, most of them at the start). Then it plans
micro-batches from several start positions, without a filter, with one narrow filter and with fifty
filters, with and without an effective limit, and the splits of the whole bucket. Each figure of a
micro-batch includes ``latest_offset`` and ``tasks`` of the planner, as Spark calls them.

``--store`` keeps the bucket for the next run. The next server process reads the bucket from disk
and counts faster than the process that received the entries: 25 ms instead of 165 ms for a count
without a filter. So the figures of a kept bucket differ from those of a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.support.machine import Stopwatch, machine
from benchmarks.support.planner_bucket import (
    BUCKET,
    KEYS,
    Requests,
    fill,
    moved,
    planning,
    position_of,
)
from benchmarks.support.progress import progress, with_timeout
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.direct_get.count import count_messages
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.options import kv_options
from nats_stream_source.spark.formats.offsets import Offset
from nats_stream_source.spark.planning.query_planner import QueryPlanner

_SECONDS = 6.0  # of idling
_SPLITS = 4
_LEAST_MESSAGES = 20_000  # of fewer, there would be no last 5000, nor two entries of each group
# When to give up; on a busy machine a round took up to three seconds.
_ROUND_SECONDS = 10.0
_IDLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Planned:
    """How long it took to plan one micro-batch, several times; milliseconds.

    ``rows`` and ``splits`` are of the last one: what the limit left, into how many tasks.
    """

    filters: str
    where: str
    limit: int | None
    p50: float
    worst: float
    requests: int
    splits: int
    rows: int


@dataclass(frozen=True, slots=True)
class Divided:
    """The splits of the whole bucket: milliseconds to plan them, and their rows."""

    filters: str
    splits: int
    p50: float
    requests: int
    smallest: int
    largest: int


@dataclass(frozen=True, slots=True)
class Resting:
    """What an idle query costs: shares of one core, looks a second."""

    filters: str
    writes: int
    planner: float
    server: float
    baseline: float
    requests: float


async def planned(
    url: str, filters: str, where: str, at: int, newest: int, limit: int | None, rounds: int
) -> Planned:
    """Plan micro-batches from about the sequence ``at`` on; with a limit, one after the other.

    Args:
        newest: the sequence of the last message that matches. Where the limit would not bind any
            more before it, another planner begins anew: this one would remember.
    """
    limits = {} if limit is None else {"maxRowsPerTrigger": str(limit)}
    took: list[float] = []
    asked = splits = rows = 0
    at = max(0, min(at, newest - rounds))
    furthest = min(newest - 1, newest if limit is None else newest - (newest - at) // 10)
    with Requests() as requests:
        while len(took) < rounds:
            async with planning(url, keys=KEYS[filters], **limits) as planner:
                first = await planner.initial_offset()
                start = moved(first, at)
                while len(took) < rounds and position_of(start).stream_seq <= furthest:
                    requests.count = 0
                    began = time.perf_counter()
                    end = await planner.latest_offset(start)
                    plans = await planner.tasks(start, end)
                    took.append((time.perf_counter() - began) * 1e3)
                    asked += requests.count
                    if end == start:
                        raise RuntimeError(
                            f"nothing to read from {position_of(start).stream_seq} on"
                        )
                    splits = len(plans)
                    rows = position_of(end).consumer_seq - position_of(start).consumer_seq
                    start = end
                    if limit is None:  # from elsewhere, or the planner would remember
                        start = moved(first, at + len(took))
    return Planned(
        filters,
        where,
        limit,
        statistics.median(took),
        max(took),
        asked // rounds,
        splits,
        rows,
    )


async def divided(url: str, filters: str, rounds: int) -> Divided:
    """Plan the splits of all that is in the bucket."""
    took: list[float] = []
    with Requests() as requests:
        for _ in range(rounds):
            async with planning(url, keys=KEYS[filters], minPartitions=str(_SPLITS)) as planner:
                start = await planner.initial_offset()
                end = await planner.latest_offset(start)
                requests.count = 0
                began = time.perf_counter()
                plans = [plan for task in await planner.tasks(start, end) for plan in task]
                took.append((time.perf_counter() - began) * 1e3)
                asked = requests.count
    link = ReusableConnection(kv_options({"servers": url, "bucket": BUCKET}).connection)
    try:
        jetstream = JetStream(await link.connection())
        counts = [
            await count_messages(jetstream, plan.range.stream, seq + 1, plan.range.filters)
            for plan in plans
            for seq in (plan.range.start, plan.range.end)
        ]
    finally:
        await link.drop()
    rows = [
        before.messages - after.messages
        for before, after in zip(counts[::2], counts[1::2], strict=True)
    ]
    return Divided(filters, len(plans), statistics.median(took), asked, min(rows), max(rows))


async def resting(server: NatsServer, filters: str, writes: int) -> Resting:
    """An idle query, asked every 10 ms as Spark does; ``writes`` a second that do not match."""
    shift = 0.0

    def clock() -> float:
        return time.monotonic() + shift

    with Requests() as requests:
        async with planning(server.url, clock, keys=KEYS[filters]) as planner:
            start = await planner.latest_offset(await planner.initial_offset())
            for _ in range(3):
                start = await _ask(planner, start)
                shift += 30  # a silence in which looks have become rare
            over = asyncio.Event()
            writer = asyncio.create_task(_write(server, writes, over))
            requests.count = 0
            try:
                with Stopwatch(server.pid) as watch:
                    stop = time.perf_counter() + _SECONDS
                    while time.perf_counter() < stop:
                        start = await _ask(planner, start)
                asked = requests.count
            finally:
                over.set()
                await writer
        with Stopwatch(server.pid) as nothing:
            await asyncio.sleep(_SECONDS / 2)
    baseline = nothing.other_cpu / nothing.wall
    return Resting(
        filters,
        writes,
        watch.own_cpu / watch.wall,
        watch.other_cpu / watch.wall,
        baseline,
        asked / watch.wall,
    )


async def _ask(planner: QueryPlanner, start: Offset) -> Offset:
    end = await planner.latest_offset(start)
    await asyncio.sleep(0.01)
    return end


async def _write(server: NatsServer, writes: int, over: asyncio.Event) -> None:
    """Write so many entries a second until it is ``over``.

    Each has a key of its own: a few keys written again and again would leave a kept bucket with
    holes at its end, more of them with every run.

    It is not cancelled: ``asyncio.wait_for`` of Python 3.11, below each request, drops a
    cancellation that comes together with the answer, and the writer would go on for ever.
    """
    if not writes:
        return
    link = ReusableConnection(kv_options({"servers": server.url, "bucket": BUCKET}).connection)
    try:
        connection = await link.connection()
        began, written = time.perf_counter(), 0
        while not over.is_set():
            await connection.request(f"$KV.{BUCKET}.p999.{time.time_ns()}", b"v")
            written += 1
            await asyncio.sleep(max(0.0, began + written / writes - time.perf_counter()))
    finally:
        await link.drop()


def measure(server: NatsServer, rounds: int) -> tuple[list[Planned], list[Divided], list[Resting]]:
    """All figures, on a server whose bucket is filled.

    Raises:
        RuntimeError: one of them takes far too long.
    """
    return asyncio.run(_measure(server, rounds))


async def _measure(
    server: NatsServer, rounds: int
) -> tuple[list[Planned], list[Divided], list[Resting]]:
    cases: list[tuple[str, str, int, int, int | None]] = []
    for filters, few in (("none", 10_000), ("one narrow", 20), ("fifty", 1000)):
        async with planning(server.url, keys=KEYS[filters]) as planner:
            first = await planner.initial_offset()
            newest = position_of(await planner.latest_offset(first)).stream_seq
        last = position_of(first).initial_through
        for where, at in (("beginning", 0), ("half", last // 2), ("99 %", last // 100 * 99)):
            cases += [(filters, where, at, newest, limit) for limit in (None, few)]
        cases.append((filters, "last 5000", last - 5000, newest, None))
    plans, rests = [], []
    with progress("planning", len(cases)) as step:
        for case in cases:
            what = f"planning with filters: {case[0]}, from: {case[1]}, limit: {case[4]},"
            work = planned(server.url, *case, rounds)
            plans.append(await with_timeout(_ROUND_SECONDS * rounds, what, work))
            step(1)
    divisions = [
        await with_timeout(
            _ROUND_SECONDS * rounds, f"splits of {filters}", divided(server.url, filters, rounds)
        )
        for filters in KEYS
    ]
    idle = [(filters, 0) for filters in KEYS] + [("one narrow", 200), ("fifty", 200)]
    with progress("idling", len(idle)) as step:
        for filters, writes in idle:
            what = f"idling with filters: {filters}, {writes} writes a second,"
            rests.append(await with_timeout(_IDLE_SECONDS, what, resting(server, filters, writes)))
            step(1)
    return plans, divisions, rests


def tables(
    plans: Sequence[Planned], divisions: Sequence[Divided], rests: Sequence[Resting]
) -> list[Table]:
    """The results for a terminal."""
    shown = Table("filters", "from", "limit", "p50", "worst", "requests", "splits", "rows")
    for one in plans:
        shown.add_row(
            one.filters,
            one.where,
            "" if one.limit is None else f"{one.limit:,}",
            f"{one.p50:.1f} ms",
            f"{one.worst:.1f} ms",
            f"{one.requests}",
            f"{one.splits}",
            f"{one.rows:,}",
        )
    split = Table("filters", "splits", "p50", "requests", "smallest", "largest")
    for part in divisions:
        split.add_row(
            part.filters,
            f"{part.splits}",
            f"{part.p50:.1f} ms",
            f"{part.requests}",
            f"{part.smallest:,}",
            f"{part.largest:,}",
        )
    idle = Table("filters", "other writes", "planner", "server", "server alone", "requests")
    for rest in rests:
        idle.add_row(
            rest.filters,
            f"{rest.writes}/s",
            f"{rest.planner:.2%}",
            f"{rest.server:.2%}",
            f"{rest.baseline:.2%}",
            f"{rest.requests:.0f}/s",
        )
    return [shown, split, idle]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print three tables, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a bucket of 200,000 messages")
    parser.add_argument("--messages", type=int)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--store", type=Path, help="the directory of a kept bucket, created if missing"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    messages = options.messages or (200_000 if options.quick else 10_000_000)
    if messages < _LEAST_MESSAGES or options.rounds < 1:
        parser.error(f"at least {_LEAST_MESSAGES:,} messages and one round")
    console = Console()
    host = machine()
    console.print(str(host), highlight=False)
    with NatsServer(store=options.store) as server:
        fill(server, messages, messages // 10)
        plans, divisions, rests = measure(server, options.rounds)
    for table in tables(plans, divisions, rests):
        console.print(table)
    if options.json:
        results = {
            "machine": host.as_dict(),
            "planned": [asdict(one) for one in plans],
            "divided": [asdict(one) for one in divisions],
            "resting": [asdict(one) for one in rests],
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
