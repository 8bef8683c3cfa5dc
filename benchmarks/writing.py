"""Writing of one connection compared with a bare socket, and ``df.write`` with Spark's Kafka sink.

``python -m benchmarks.writing [--quick] [--no-spark] [--no-kafka] [--json FILE] [--size 128 ...]``

For each value size, with and without headers, with and without message ids, several clients write
the same entries to an empty bucket in turns, each with its PubAcks:

===================  ===============================================================================
bare socket          prepared frames, 4,096 messages (8 MiB) in flight, PubAcks counted only
``BatchPublisher``   columns of messages (``MessageColumns``): encoding, sending, PubAcks
sink                 ``KvRowEncoder`` and ``KvBatchWriter``: Arrow rows, as a Spark task has them
===================  ===============================================================================

A ratio is that of one round; the table has the median and the minimum of the rounds. Server and
client share the cores, so CPU that a client uses is missing for the server.

In Spark (``benchmarks/support/spark_write.py``) a Parquet file is written to a bucket and to a
topic in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.support import raw_publish
from benchmarks.support.bucket_data import bucket_config, create_bucket
from benchmarks.support.machine import Run, Stopwatch
from benchmarks.support.output import finish
from benchmarks.support.raw_connection import RawConnection
from benchmarks.support.report import WRITERS
from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.batch_writer import KvBatchWriter
from nats_stream_source.jetstream.kv.bucket import Bucket
from nats_stream_source.jetstream.publish.batch_publisher import BatchPublisher, MessageColumns
from nats_stream_source.spark.writing.kv_rows import KvRowEncoder
from nats_stream_source.spark.writing.rows import BatchPosition, MessageIds

SIZES = (16, 128, 1024, 16384)
WAYS = BARE, BATCH, SINK = WRITERS
_KEYS = 10_000
_BATCH_ROWS = 10_000  # as Spark's record batches
_MAX_BYTES = 160 << 20


@dataclass(frozen=True, slots=True)
class Result:
    """All clients for one kind of message.

    Attributes:
        ways: the medians of each client.
        ratios: the rate of each client divided by that of the bare socket, by round.
    """

    size: int
    headers: bool
    ids: bool
    rows: int
    ways: dict[str, Run]
    ratios: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, way: str) -> float:
        """The median of the rounds."""
        return statistics.median(self.ratios[way])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"ratio": {way: self.ratio(way) for way in self.ways}}


async def measure(
    size: int,
    *,
    headers: bool,
    ids: bool,
    rows: int,
    rounds: int,
    ways: Sequence[str] = WAYS,
) -> Result:
    """Write ``rows`` entries (fewer if the values are large) ``rounds`` times in each way."""
    rows = min(rows, _MAX_BYTES // (size + 120))
    batches = record_batches(size, headers, rows)
    runs: dict[str, list[Run]] = {}
    with NatsServer() as server:
        create_bucket(server.port, "bench", history=64)
        settings = ConnectionSettings(servers=(server.url,))
        async with await Connection.open(settings) as connection:
            for turn in range(rounds + 1):
                for way in ways:
                    task = _Task(server, connection, batches, f"{turn}-{way[:2]}", ids)
                    count, run = await task.prepare(way)
                    with Stopwatch(server.pid) as watch:
                        stored = await run()
                    if stored != count:
                        raise RuntimeError(f"{way}: {stored:,} of {count:,} messages stored")
                    _purge(server.port, count)
                    if turn:  # the first round warms up
                        runs.setdefault(way, []).append(watch.run(count))
    medians = {way: Run.median(found) for way, found in runs.items()}
    ratios = {
        way: [one.rate / bare.rate for one, bare in zip(found, runs[BARE], strict=True)]
        for way, found in runs.items()
    }
    return Result(size, headers, ids, rows, medians, ratios)


def record_batches(size: int, headers: bool, rows: int) -> list[pa.RecordBatch]:
    """The rows of a DataFrame: ``key``, ``value`` and, with ``headers``, two headers of each."""
    values = [random.Random(i).randbytes(size) for i in range(64)]
    batches = []
    for first in range(0, rows, _BATCH_ROWS):
        numbers = range(first, min(first + _BATCH_ROWS, rows))
        columns = {
            "key": pa.array([f"key.{i % _KEYS}" for i in numbers], pa.string()),
            "value": pa.array([values[i % 64] for i in numbers], pa.binary()),
        }
        if headers:
            maps = [[("Trace", [f"{i:012d}"]), ("Content-Type", ["text/plain"])] for i in numbers]
            columns["headers"] = pa.array(maps, pa.map_(pa.string(), pa.list_(pa.string())))
        batches.append(pa.RecordBatch.from_pydict(columns))
    return batches


def _purge(port: int, expected: int) -> None:
    with RawConnection(port) as connection:
        info = connection.request("$JS.API.STREAM.INFO.KV_bench", {})
        if info["state"]["messages"] != expected:
            raise RuntimeError(f"{info['state']['messages']:,} of {expected:,} messages are stored")
        connection.request("$JS.API.STREAM.PURGE.KV_bench", {})


Way = Callable[[], Awaitable[int]]


class _Task:
    """One pass of one client; :meth:`prepare` does what is not measured."""

    def __init__(
        self,
        server: NatsServer,
        connection: Connection,
        batches: Sequence[pa.RecordBatch],
        job: str,
        ids: bool,
    ) -> None:
        self._port = server.port
        self._connection = connection
        self._jetstream = JetStream(connection)
        self._batches = batches
        self._job = job
        self._ids = ids

    async def prepare(self, way: str) -> tuple[int, Way]:
        """The number of messages, and what sends them and returns how many are stored."""
        rows = sum(batch.num_rows for batch in self._batches)
        if way == SINK:
            return rows, self._sink
        columns = self._columns("bench")
        if way == BATCH:
            return rows, lambda: self._batch_publisher(columns)
        prepared = raw_publish.prepare(columns)
        return rows, lambda: _direct(raw_publish.publish, self._port, prepared)

    def _encoder(self, bucket: str) -> KvRowEncoder:
        return KvRowEncoder(bucket, f"$KV.{bucket}.", MessageIds(self._job, self._ids), None)

    def _columns(self, bucket: str) -> list[MessageColumns]:
        encoder, position = self._encoder(bucket), BatchPosition(0)
        columns = []
        for batch in self._batches:
            columns.append(encoder.encode(batch, position))
            position.row += batch.num_rows
        return columns

    async def _sink(self) -> int:
        encoder, position = self._encoder("bench"), BatchPosition(0)
        bucket = Bucket.from_stream_config("bench", bucket_config("bench", 64))
        async with KvBatchWriter(self._jetstream, bucket) as writer:
            for batch in self._batches:
                await writer.send(encoder.encode(batch, position))
                position.row += batch.num_rows
            await writer.flush()
        return writer.stored

    async def _batch_publisher(self, columns: Sequence[MessageColumns]) -> int:
        async with BatchPublisher(self._jetstream, "KV_bench") as publisher:
            for messages in columns:
                await publisher.send(messages)
            await publisher.flush()
        return publisher.stored


async def _direct(send: Callable[[int, raw_publish.Prepared], int], *arguments: Any) -> int:
    return send(*arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="128 bytes, few rows and rounds")
    parser.add_argument("--size", type=int, action="append", help="bytes of a value (repeatable)")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--plain", action="store_true", help="without headers and ids only")
    parser.add_argument("--way", action="append", choices=WAYS[1:], help="repeatable; default all")
    parser.add_argument("--no-spark", action="store_true")
    parser.add_argument("--no-kafka", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rounds = options.rounds or (2 if options.quick else 5)
    ways = WAYS if options.way is None else (BARE, *options.way)
    plain = options.plain or options.quick
    results = []
    for size in options.size or ((128,) if options.quick else SIZES):
        for headers in (False,) if plain else (False, True):
            for ids in (False,) if plain else (False, True):
                rows = 50_000 if options.quick else options.rows
                measuring = measure(
                    size, headers=headers, ids=ids, rows=rows, rounds=rounds, ways=ways
                )
                results.append(asyncio.run(measuring))
    figures = {"writing": [one.as_dict() for one in results]}
    if not options.no_spark:
        from benchmarks.support import spark_write

        sinks = spark_write.measure(
            50_000 if options.quick else 1_000_000,
            1 if options.quick else 5,
            kafka=not options.no_kafka,
            report=print,
        )
        figures["spark"] = [one.as_dict() for one in sinks]
    finish("writing", figures, options.json)


if __name__ == "__main__":
    main()
