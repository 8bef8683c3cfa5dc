"""The cost of a small micro-batch of ``nats_kv`` beyond that of an empty Python source.

``python -m benchmarks.microbatch [--batches 100] [--quick] [--json FILE]``

Both queries run in one session with the no-op sink and alternate: put one entry, wait for its
batch, trigger the empty source, wait for its batch. The benchmark compares the medians of Spark's
own times of the batches (``triggerExecution``). It runs on a bucket of 10,000 keys, and on a bucket
of 500,000 keys in which 90 % of the sequences were removed, so that creating a consumer and
counting messages with Direct Get are slow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console
from rich.table import Table

from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.empty_source import EmptySource
from benchmarks.support.machine import OtherProcesses, machine
from benchmarks.support.raw_connection import fill
from benchmarks.support.spark_session import spark_session
from nats_stream_source.embedded import NatsServer

_WARM_UP = 10  # batches of each query before the counted ones


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket with one revision per key, filled with ``writes`` entries on ``keys`` keys."""

    keys: int
    writes: int

    @property
    def holes(self) -> float:
        """The share of sequences without a message."""
        return 1 - self.keys / self.writes


SMALL = Bucket(10_000, 10_000)
HOLES = Bucket(500_000, 5_000_000)


def benchmark_buckets(quick: bool) -> list[Bucket]:
    """The buckets to measure on; with ``quick`` a tenth of their size."""
    share = 10 if quick else 1
    return [Bucket(one.keys // share, one.writes // share) for one in (SMALL, HOLES)]


@dataclass(frozen=True, slots=True)
class Result:
    """Median milliseconds; the keys of ``parts`` are Spark's names of a batch's phases."""

    bucket: Bucket
    batches: int
    nats: float
    empty: float
    nats_parts: dict[str, float]
    empty_parts: dict[str, float]
    others: dict[str, float]

    @property
    def extra(self) -> float:
        """The difference of ``nats_kv`` and the empty source, in milliseconds."""
        return self.nats - self.empty

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"extra": self.extra}


def measure(spark: SparkSession, bucket: Bucket, batches: int) -> Result:
    """Fill a bucket and run ``batches`` micro-batches of one row on it and on the empty source."""
    spark.dataSource.register(EmptySource)
    with NatsServer() as server, tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        pairs = entries(bucket.writes, bucket.keys, scattered=bucket.writes > bucket.keys)
        fill_bucket(server.port, "bench", pairs, history=1)
        grows = Path(scratch, "grows")
        grows.touch()
        options = {"servers": server.url, "bucket": "bench", "updatesOnly": "true"}
        queries: list[StreamingQuery] = []
        try:
            queries.append(_start(spark, "nats_kv", options, scratch))
            queries.append(_start(spark, "empty_bench", {"path": str(grows)}, scratch))
            nats, empty = queries
            with OtherProcesses() as others:
                for i in range(batches + _WARM_UP):
                    fill(server.port, [(f"$KV.bench.key.{i % bucket.keys}", b"", b"v" * 128)])
                    nats.processAllAvailable()
                    with grows.open("ab") as file:
                        file.write(b".")
                    empty.processAllAvailable()
            parts = [_parts(query, batches) for query in queries]
        finally:
            for query in queries:
                query.stop()
    nats_parts, empty_parts = parts
    return Result(
        bucket,
        batches,
        nats_parts.pop("triggerExecution"),
        empty_parts.pop("triggerExecution"),
        nats_parts,
        empty_parts,
        others.as_dict(),
    )


def _start(
    spark: SparkSession, source: str, options: dict[str, str], scratch: str
) -> StreamingQuery:
    frame = spark.readStream.format(source).options(**options).load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", f"{scratch}/{source}")
    query = writer.start()
    query.processAllAvailable()
    return query


def _parts(query: StreamingQuery, batches: int) -> dict[str, float]:
    full = [one["durationMs"] for one in query.recentProgress if one["numInputRows"]]
    if len(full) < batches + _WARM_UP:
        raise RuntimeError(f"{len(full)} batches with rows, not {batches + _WARM_UP}")
    counted = full[-batches:]
    return {name: statistics.median(one[name] for one in counted) for name in counted[0]}


def table(results: Sequence[Result]) -> Table:
    """The results for a terminal."""
    shown = Table("keys", "holes", "nats_kv", "empty source", "more", "where")
    for one in results:
        more = {
            name: one.nats_parts[name] - one.empty_parts.get(name, 0.0) for name in one.nats_parts
        }
        where = sorted(((ms, name) for name, ms in more.items() if ms >= 1), reverse=True)
        shown.add_row(
            f"{one.bucket.keys:,}",
            f"{one.bucket.holes:.0%}",
            f"{one.nats:.0f} ms",
            f"{one.empty:.0f} ms",
            f"{one.extra:.0f} ms",
            ", ".join(f"{name} {ms:.0f}" for ms, name in where),
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="a tenth of the keys")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    buckets = benchmark_buckets(options.quick)
    console = Console(highlight=False)
    host = machine()
    console.print(str(host))
    with spark_session() as spark:
        results = [measure(spark, bucket, options.batches) for bucket in buckets]
    console.print(table(results))
    if options.json is not None:
        shown = {"machine": host.as_dict(), "microbatch": [one.as_dict() for one in results]}
        options.json.write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    main()
