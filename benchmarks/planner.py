"""What does planning cost? Micro-batches of a large bucket of mostly holes, and an idle query.

``python -m benchmarks.planner [--quick] [--json FILE] [--store DIRECTORY] [--rounds 20]``

A bucket with 1,000,000 keys is filled with 10,000,000 random overwrites (one revision a key, so
that nine tenths of all sequences are holes, most of them at the beginning). Then micro-batches are
planned from several places, without a filter, with one narrow filter and with fifty: where no limit
can bind, and where one does. Each figure is of ``Planner.latest`` and ``Planner.plans`` together,
as Spark calls them. ``--store`` keeps the bucket for the next run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from rich.console import Console
from rich.table import Table

from benchmarks.entries import fill_bucket
from benchmarks.machine import Stopwatch, machine
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import BucketNotFoundError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.bucket import look_up
from nats_stream_source.jetstream.link import Link
from nats_stream_source.options import kv_options
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.planner import Planner
from nats_stream_source.source.query import query_of

BUCKET = "big"
KEYS = {
    "none": "",
    "one narrow": "p007.*",
    "fifty": ",".join(f"p{i:03}.*" for i in range(50)),
}
_GROUPS = 1000  # first tokens of keys: a filter for one of them matches a thousandth
_SECONDS = 6.0  # of idling


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
class Resting:
    """What an idle query costs: shares of one core, looks a second."""

    filters: str
    writes: int
    planner: float
    server: float
    baseline: float
    requests: float


@asynccontextmanager
async def planning(
    url: str, clock: Callable[[], float] = time.monotonic, **options: str
) -> AsyncIterator[Planner]:
    """A planner for the bucket, as in a new process."""
    given = {"servers": url, "bucket": BUCKET} | {k: v for k, v in options.items() if v}
    parsed = kv_options(given)
    link = Link(parsed.connection)
    try:
        yield Planner(query_of(parsed), link, clock)
    finally:
        await link.drop()


def fill(server: NatsServer, messages: int, keys: int) -> None:
    """Make the bucket, unless the server's store has it."""

    async def there() -> bool:
        link = Link(kv_options({"servers": server.url, "bucket": BUCKET}).connection)
        try:
            await look_up(JetStream(await link.connection()), BUCKET)
        except BucketNotFoundError:
            return False
        finally:
            await link.drop()
        return True

    if not asyncio.run(there()):
        fill_bucket(server.port, BUCKET, _pairs(messages, keys), history=1)


def _pairs(messages: int, keys: int) -> Iterator[tuple[str, bytes]]:
    chance = random.Random(1)
    for i in range(messages):
        key = chance.randrange(keys)
        yield f"p{key % _GROUPS:03}.k{key}", b"%032d" % i


class _Requests:
    """Counts requests of all planners, of every kind."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> _Requests:
        self._publish = Client.publish

        async def publish(client: Client, *args: Any, **named: Any) -> None:
            self.count += 1
            await self._publish(client, *args, **named)

        Client.publish = publish  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Client.publish = self._publish  # type: ignore[method-assign]


async def planned(
    url: str, filters: str, where: str, at: int, limit: int | None, rounds: int
) -> Planned:
    """Plan micro-batches from about the sequence ``at`` on; with a limit, one after the other."""
    took: list[float] = []
    with _Requests() as requests:
        async with planning(url, keys=KEYS[filters]) as planner:
            first = await planner.initial()
            start = begin = replace(first, origin=at, stream_seq=at)
            requests.count = 0
            splits = rows = 0
            for i in range(rounds):
                if limit is None:  # from elsewhere, or the planner would remember
                    start = replace(first, origin=at + i, stream_seq=at + i)
                elif start.stream_seq > first.initial_through // 1000 * 999:
                    start = begin
                began = time.perf_counter()
                end = await planner.latest(start, limit)
                plans = await planner.plans(start, end)
                if end == start:
                    raise RuntimeError(f"nothing to read from {start.stream_seq} on")
                took.append((time.perf_counter() - began) * 1e3)
                splits, rows = len(plans), end.consumer_seq - start.consumer_seq
                start = end
    return Planned(
        filters,
        where,
        limit,
        statistics.median(took),
        max(took),
        requests.count // rounds,
        splits,
        rows,
    )


async def resting(server: NatsServer, filters: str, writes: int) -> Resting:
    """An idle query, asked every 10 ms as Spark does; ``writes`` a second that do not match."""
    shift = 0.0

    def clock() -> float:
        return time.monotonic() + shift

    with _Requests() as requests:
        async with planning(server.url, clock, keys=KEYS[filters]) as planner:
            start = await planner.latest(await planner.initial(), None)
            for _ in range(3):
                start = await _ask(planner, start)
                shift += 30  # a silence in which looks have become rare
            writer = asyncio.create_task(_write(server, writes))
            requests.count = 0
            with Stopwatch(server.pid) as watch:
                stop = time.perf_counter() + _SECONDS
                while time.perf_counter() < stop:
                    start = await _ask(planner, start)
            asked = requests.count
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        with Stopwatch(server.pid) as nothing:
            await asyncio.sleep(_SECONDS / 2)
    baseline = nothing.other_cpu / nothing.wall
    return Resting(
        filters,
        writes,
        watch.own_cpu / watch.wall,
        watch.other_cpu / watch.wall,
        baseline,
        (asked - writes * _SECONDS) / watch.wall,
    )


async def _ask(planner: Planner, start: Offset) -> Offset:
    end = await planner.latest(start, None)
    await asyncio.sleep(0.01)
    return end


async def _write(server: NatsServer, writes: int) -> None:
    if not writes:
        return
    link = Link(kv_options({"servers": server.url, "bucket": BUCKET}).connection)
    try:
        client = (await link.connection()).client
        for i in itertools.count():
            await client.request(f"$KV.{BUCKET}.p999.other{i % 10}", b"v")
            await asyncio.sleep(1 / writes)
    finally:
        await link.drop()


def measure(server: NatsServer, rounds: int) -> tuple[list[Planned], list[Resting]]:
    """All figures, on a server whose bucket is filled."""

    async def whole() -> tuple[list[Planned], list[Resting]]:
        async with planning(server.url) as planner:
            last = (await planner.initial()).initial_through
        plans = []
        for filters in KEYS:
            few = {"none": 10_000, "one narrow": 20, "fifty": 1000}[filters]
            for where, at in (("beginning", 0), ("half", last // 2), ("99 %", last // 100 * 99)):
                for limit in (None, few):
                    plans.append(await planned(server.url, filters, where, at, limit, rounds))
            at = last - 5000
            plans.append(await planned(server.url, filters, "last 5000", at, None, rounds))
        rests = [await resting(server, filters, 0) for filters in KEYS]
        rests += [await resting(server, filters, 200) for filters in ("one narrow", "fifty")]
        return plans, rests

    return asyncio.run(whole())


def tables(plans: Sequence[Planned], rests: Sequence[Resting]) -> list[Table]:
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
    return [shown, idle]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print two tables, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a bucket of 200,000 messages")
    parser.add_argument("--messages", type=int)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--store", type=Path, help="where the bucket is, or is kept")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    messages = given.messages or (200_000 if given.quick else 10_000_000)
    console = Console()
    place = machine()
    console.print(str(place), highlight=False)
    with NatsServer(store=given.store) as server:
        fill(server, messages, messages // 10)
        plans, rests = measure(server, given.rounds)
    for table in tables(plans, rests):
        console.print(table)
    if given.json:
        results = {
            "machine": place.as_dict(),
            "planned": [asdict(one) for one in plans],
            "resting": [asdict(one) for one in rests],
        }
        given.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
