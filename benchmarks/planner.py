"""The cost of planning micro-batches of a large, mostly compacted bucket.

``python -m benchmarks.planner [--quick] [--json FILE] [--store DIRECTORY] [--rounds 20]``

The benchmark fills a bucket of 1,000,000 keys with 10,000,000 random overwrites (one revision per
key, so nine tenths of all sequences were removed, most of them at the start). Then it plans
micro-batches from several start positions, without a filter, with one narrow filter and with fifty
filters, with and without an effective limit. Each figure includes ``latest_offset`` and ``tasks``
of the planner, as Spark calls them.

``--store`` keeps the bucket for the next run. The next server process reads the bucket from disk
and counts faster than the process that received the entries: 25 ms instead of 165 ms for a count
without a filter. So the figures of a kept bucket differ from those of a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.support.output import finish
from benchmarks.support.planner_bucket import (
    KEYS,
    Requests,
    fill,
    moved,
    planning,
    position_of,
)
from nats_stream_source.embedded import NatsServer

_LEAST_MESSAGES = 20_000  # of fewer, there would be no last 5000, nor two entries of each group
# When to give up; on a busy machine a round took up to three seconds.
_ROUND_SECONDS = 10.0


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


async def measure(server: NatsServer, rounds: int) -> list[Planned]:
    """All figures, on a server whose bucket is filled.

    Raises:
        TimeoutError: one of them takes far too long.
    """
    cases: list[tuple[str, str, int, int, int | None]] = []
    for filters, few in (("none", 10_000), ("one narrow", 20), ("fifty", 1000)):
        async with planning(server.url, keys=KEYS[filters]) as planner:
            first = await planner.initial_offset()
            newest = position_of(await planner.latest_offset(first)).stream_seq
        last = position_of(first).initial_through
        for where, at in (("beginning", 0), ("half", last // 2), ("99 %", last // 100 * 99)):
            cases += [(filters, where, at, newest, limit) for limit in (None, few)]
        cases.append((filters, "last 5000", last - 5000, newest, None))
    plans = []
    for case in cases:
        work = planned(server.url, *case, rounds)
        plans.append(await asyncio.wait_for(work, _ROUND_SECONDS * rounds))
    return plans


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write JSON if asked for."""
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
    with NatsServer(store=options.store) as server:
        fill(server, messages, messages // 10)
        plans = asyncio.run(measure(server, options.rounds))
    finish("planner", {"planned": [asdict(one) for one in plans]}, options.json)


if __name__ == "__main__":
    main()
