"""The freshness of a Delta table that follows a bucket: put → row visible to an independent reader.

``python -m benchmarks.freshness [--case WAY:KEYS:RATE ...] [--seconds 20] [--size KEYS ...]``

One process puts entries at a constant rate and notes the time of each put. A query merges them into
a table with ``merge_changes``, in a session of ``configure`` and with asynchronous logs, as
``follow`` starts it. A third process, without Spark, opens each new version of the table with
``deltalake`` and reads its greatest revision: every put up to it is then visible. The bare
``foreachBatch`` of the same run, which collects the rows on the driver as Arrow, shows the part of
the source and of Spark. The percentiles exclude the first quarter of the puts.

The second part merges batches of one size into tables of 10^4 to 10^7 keys with each engine, each
in a process of its own. ``benchmarks.commits`` has the memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.delta_merge import ENGINES, SIZES, MergeResult, measure_merge
from benchmarks.support.machine import OtherProcesses, resident_bytes
from benchmarks.support.output import finish
from benchmarks.support.spark_session import spark_session
from benchmarks.support.steady_puts import put_steadily
from nats_stream_source.delta import configure, merge_changes
from nats_stream_source.delta.spark.follow import ASYNC_PROGRESS
from nats_stream_source.embedded import NatsServer

WAYS: dict[str, dict[str, Any]] = {
    "foreachBatch": {},
    **ENGINES,
    "history": {"engine": "driver", "stored_as_scd_type": 2},
}
"""Arguments of ``merge_changes``, by name; the first one does not merge.

``benchmarks.history`` measures the last one, beside ``driver``.
"""

_FAST = ("foreachBatch", "driver")
CASES = (
    *(f"{way}:{keys}:1000" for keys in (4_000, 100_000) for way in ("foreachBatch", *ENGINES)),
    *(f"{way}:{keys}:1000" for keys in (1_000_000, 10_000_000) for way in _FAST),
    *(f"{way}:{keys}:20000" for keys in (4_000, 1_000_000) for way in _FAST),
)
"""An engine that rewrites files does not keep up with a large table."""

MAX_ROWS = 50_000  # of a micro-batch
_SIZE = 128  # bytes of a value
_TICK = 0.001  # seconds between two looks at the table's log
_DEADLINE = 180.0  # seconds for the last puts to become visible

_spawned = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds from put to visible, and the work of the query.

    Attributes:
        way: of ``WAYS``.
        behind: seconds from the last put until it was visible.
        memory: peak resident memory of the driver's Python process in bytes, since its start.
    """

    way: str
    rate: int
    keys: int
    puts: int
    p50: float
    p99: float
    behind: float
    batches: int
    memory: int
    others: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


Visible = list[tuple[int, int]]
"""Pairs of time in ns and the greatest revision visible from then on."""


def put_values(port: int, rate: int, keys: int, count: int, times: Path) -> None:
    """Put ``count`` entries, ``rate`` a second, and save the time of each in ns."""
    due_times = np.zeros(count, np.int64)
    value = b"x" * _SIZE
    numbers = np.random.default_rng(1).integers(0, keys, count).tolist()

    def put(first: int, last: int, now: int) -> list[bytes]:
        due_times[first:last] = now
        return [
            b"PUB $KV.bench.key.%d %d\r\n%s\r\n" % (number, _SIZE, value)
            for number in numbers[first:last]
        ]

    put_steadily(port, rate, count, put)
    np.save(times, due_times)


def watch_table(path: str, last: int, visible: Queue[Visible], deadline: float) -> None:
    """Open each new version until revision ``last`` is visible; put what was seen into a queue."""
    table, seen = DeltaTable(path), []
    until = time.monotonic() + deadline
    while time.monotonic() < until and not (seen and seen[-1][1] >= last):
        if not os.path.exists(f"{path}/_delta_log/{table.version() + 1:020}.json"):
            time.sleep(_TICK)
            continue
        table.update_incremental()
        revisions = pa.table(table.get_add_actions(flatten=True))["max.revision"].to_pylist()
        if revisions:
            seen.append((time.time_ns(), max(revisions)))
    visible.put(seen)


def latencies(puts: np.ndarray, first: int, visible: Visible) -> np.ndarray:
    """Milliseconds from each put to the first time at which its revision was visible.

    Args:
        puts: times in ns; the first put has the revision ``first``.
        visible: in the order of time.
    """
    times = np.array([at for at, _ in visible])
    revisions = np.maximum.accumulate([revision for _, revision in visible])
    position = np.searchsorted(revisions, first + np.arange(len(puts)))
    return (times[position] - puts) / 1e6


def measure(spark: SparkSession, way: str, rate: int, keys: int, seconds: float) -> Result:
    """Follow a bucket of ``keys`` keys while ``rate`` entries a second are put for ``seconds``."""
    count = int(rate * seconds)
    arrived: Visible = []

    def take(batch: DataFrame, _: int) -> None:
        revisions = batch.select("key", "value", "revision").toArrow()["revision"]
        if len(revisions):
            arrived.append((time.time_ns(), max(revisions.to_pylist())))

    with NatsServer() as server, tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        table, times = f"{scratch}/table", Path(scratch, "times.npy")
        first = fill_bucket(server.port, "bench", entries(keys, keys, _SIZE), history=64) + 1
        options = {"servers": server.url, "bucket": "bench", "includeHistory": "true"}
        source = spark.readStream.format("nats_kv").options(**options)
        frame = source.option("maxRowsPerTrigger", MAX_ROWS).load()
        follow: Callable[[DataFrame, int], None] = take
        if way != "foreachBatch":
            follow = merge_changes(table, **WAYS[way])
        writer = frame.writeStream.foreachBatch(follow).options(**ASYNC_PROGRESS)
        query = writer.option("checkpointLocation", f"{scratch}/checkpoint").start()
        try:
            query.processAllAvailable()
            before = len(query.recentProgress)
            putting = _spawned.Process(
                target=put_values, args=(server.port, rate, keys, count, times)
            )
            with OtherProcesses() as others, watching(way, table, first + count - 1) as seen:
                putting.start()
                putting.join()
                until = time.monotonic() + _DEADLINE
                while way == "foreachBatch" and arrived[-1][1] < first + count - 1:
                    if time.monotonic() > until or query.exception() is not None:
                        break
                    time.sleep(_TICK)
                visible = arrived if way == "foreachBatch" else seen()
            batches = sum(1 for one in query.recentProgress[before:] if one["numInputRows"])
        finally:
            query.stop()
        if not visible or visible[-1][1] < first + count - 1:
            raise RuntimeError(f"not all of {count:,} puts became visible: {query.exception()}")
        puts = np.load(times)
    taken = latencies(puts, first, visible)
    p50, p99 = np.percentile(taken[count // 4 :], [50, 99])
    memory = resident_bytes(os.getpid())
    return Result(
        way,
        rate,
        keys,
        count,
        float(p50),
        float(p99),
        float(taken[-1]) / 1000,
        batches,
        memory,
        others.as_dict(),
    )


@contextmanager
def watching(way: str, table: str, last: int) -> Iterator[Callable[[], Visible]]:
    """Watch the table in another process; the value returns what it has seen at its end.

    Args:
        way: ``"foreachBatch"`` without a table to watch.
        last: the revision at which the watching ends.
    """
    if way == "foreachBatch":
        yield list
        return
    visible: Queue[Visible] = _spawned.Queue()
    process = _spawned.Process(target=watch_table, args=(table, last, visible, 2 * _DEADLINE))
    process.start()
    try:
        yield lambda: visible.get(timeout=2 * _DEADLINE)
    finally:
        process.terminate()
        process.join()


def merging_session(builder: SparkSession.Builder) -> SparkSession.Builder:
    """The settings of a session whose queries merge, on a small machine."""
    return configure(builder, delta=True, small_machine=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", action="append", help="WAY:KEYS:RATE (repeatable)")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--size", type=int, action="append", help="keys of a table (repeatable)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    cases = [case.split(":") for case in options.case or CASES]
    with spark_session(configure=merging_session) as s:
        # The first micro-batches of a session are slow.
        for way in dict.fromkeys(way for way, _, _ in cases):
            measure(s, way, 500, 1_000, 4)
        fresh = [
            measure(s, way, int(rate), int(keys), options.seconds) for way, keys, rate in cases
        ]
    merges: list[MergeResult] = [
        measure_merge(engine, size)
        for size in (SIZES if options.size is None else options.size)
        for engine in ENGINES
    ]
    figures = {
        "freshness": [one.as_dict() for one in fresh],
        "merge": [one.as_dict() for one in merges],
    }
    finish("freshness", figures, options.json)


if __name__ == "__main__":
    main()
