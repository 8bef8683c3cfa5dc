"""The cost of planning micro-batches of a large, mostly compacted bucket.

The benchmark fills a bucket of 1,000,000 keys with 10,000,000 random overwrites (one revision per
key, so nine tenths of all sequences were removed, most of them at the start). Then it plans
micro-batches from several start positions, without a filter, with one narrow filter and with fifty
filters, with and without an effective limit. Each figure includes ``latestOffset`` and the tasks.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.support.bucket_data import fill_bucket
from benchmarks.support.query import Query, Requests, options_of
from nats_stream_source.embedded import NatsServer

_BUCKET = "big"
KEYS = {
    "none": "",
    "one narrow": "p007.*",
    "fifty": ",".join(f"p{i:03}.*" for i in range(50)),
}
_GROUPS = 1000  # first tokens of keys: a filter for one of them matches a thousandth


def fill(port: int, messages: int) -> None:
    """Create the bucket and fill it with random overwrites of a tenth as many keys."""

    def pairs() -> Iterator[tuple[str, bytes]]:
        chance = random.Random(1)
        for i in range(messages):
            key = chance.randrange(messages // 10)
            yield f"p{key % _GROUPS:03}.k{key}", b"%032d" % i

    fill_bucket(port, _BUCKET, pairs(), history=1)


def planned(
    url: str, filters: str, where: str, at: int, newest: int, limit: int | None, rounds: int
) -> dict[str, Any]:
    """Plan micro-batches from about the sequence ``at`` on; with a limit, one after the other.

    ``p50`` and ``worst`` are milliseconds; ``rows`` is the number of the last one.

    Args:
        newest: the sequence of the last message that matches. Where the limit would not bind any
            more before it, a new planner takes over: this one would remember.
    """
    options = options_of(
        url, bucket=_BUCKET, keys=KEYS[filters], maxRowsPerTrigger=str(limit or "")
    )
    took: list[float] = []
    asked = rows = 0
    at = max(0, min(at, newest - rounds))
    furthest = min(newest - 1, newest if limit is None else newest - (newest - at) // 10)
    with Requests() as requests:
        while len(took) < rounds:
            with Query(options) as query:
                query.offset = start = {**query.offset, "origin": at, "stream_seq": at}
                while len(took) < rounds and start["stream_seq"] <= furthest:
                    requests.count = 0
                    began = time.perf_counter()
                    tasks = query.poll()
                    took.append((time.perf_counter() - began) * 1e3)
                    asked += requests.count
                    if not tasks:
                        raise RuntimeError(f"nothing to read from {start['stream_seq']} on")
                    rows = query.offset["consumer_seq"] - start["consumer_seq"]
                    if limit is None:  # from elsewhere, or the planner would remember
                        moved = at + len(took)
                        query.offset = {**start, "origin": moved, "stream_seq": moved}
                    start = query.offset
    return {
        "filters": filters,
        "where": where,
        "limit": limit,
        "p50": statistics.median(took),
        "worst": max(took),
        "requests": asked // rounds,
        "rows": rows,
    }


def measure(url: str, rounds: int) -> list[dict[str, Any]]:
    """All figures, on a server whose bucket is filled."""
    cases: list[tuple[str, str, int, int, int | None]] = []
    for filters, few in (("none", 10_000), ("one narrow", 20), ("fifty", 1000)):
        with Query(options_of(url, bucket=_BUCKET, keys=KEYS[filters])) as query:
            last = query.offset["initial_through"]
            query.poll()
            newest = query.offset["stream_seq"]
        for where, at in (("beginning", 0), ("99 %", last // 100 * 99)):
            cases += [(filters, where, at, newest, limit) for limit in (None, few)]
    return [planned(url, *case, rounds) for case in cases]


def run(messages: int = 10_000_000, rounds: int = 20) -> dict[str, Any]:
    """All figures, on a server that is started for them."""
    with NatsServer() as server:
        fill(server.port, messages)
        return {"planned": measure(server.url, rounds)}
