"""Writing of one connection compared with a bare socket, and ``df.write`` with Spark's Kafka sink.

For each value size, with and without headers and message ids, several clients write the same
entries to an empty bucket in turns, each with its PubAcks:

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

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from benchmarks.support import raw_connection, spark_write
from benchmarks.support.bucket_data import create_bucket, purge
from benchmarks.support.machine import Run, Stopwatch
from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.batch_writer import KvBatchWriter
from nats_stream_source.jetstream.kv.bucket import Bucket
from nats_stream_source.jetstream.publish.batch_publisher import BatchPublisher, MessageColumns
from nats_stream_source.spark.writing.rows import KvRowEncoder, MessageIds

SIZES = (16, 128, 1024, 16384)
WAYS = BARE, BATCH, SINK = ("bare socket", "BatchPublisher", "sink")
_KEYS = 10_000
_BATCH_ROWS = 10_000  # as Spark's record batches
_MAX_BYTES = 160 << 20


async def measure(size: int, *, headers: bool, rows: int, rounds: int) -> dict[str, Any]:
    """Write ``rows`` entries (fewer if the values are large) ``rounds`` times in each way.

    Args:
        headers: whether each entry has headers and a message id.

    Returns:
        ``ways`` has the medians of each client, and ``ratio`` the median of its rates divided by
        those of the bare socket.
    """
    rows = min(rows, _MAX_BYTES // (size + 120))
    batches = record_batches(size, headers, rows)
    runs: dict[str, list[Run]] = {}
    with NatsServer() as server:
        create_bucket(server.port, "bench", history=64)
        settings = ConnectionSettings(servers=(server.url,))
        async with await Connection.open(settings) as connection:
            for turn in range(rounds + 1):
                for way in WAYS:
                    message_ids = MessageIds(f"{turn}-{way[:2]}", 0, headers)
                    task = _Task(server.port, JetStream(connection), batches, message_ids)
                    run = task.prepare(way)
                    with Stopwatch(server.pid) as watch:
                        stored = await run()
                    if stored != rows:
                        raise RuntimeError(f"{way}: {stored:,} of {rows:,} messages stored")
                    purge(server.port, rows)
                    if turn:  # the first round warms up
                        runs.setdefault(way, []).append(watch.run(rows))
    ratio = {
        way: statistics.median(a.rate / b.rate for a, b in zip(found, runs[BARE], strict=True))
        for way, found in runs.items()
    }
    return {
        "size": size,
        "headers": headers,
        "ids": headers,
        "rows": rows,
        "ways": {way: asdict(Run.median(found)) for way, found in runs.items()},
        "ratio": ratio,
    }


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


@dataclass(frozen=True, slots=True)
class _Task:
    """One pass of one client; what :meth:`prepare` does is not measured."""

    port: int
    jetstream: JetStream
    batches: Sequence[pa.RecordBatch]
    ids: MessageIds

    def prepare(self, way: str) -> Callable[[], Awaitable[int]]:
        """What sends the messages and returns how many are stored."""
        if way == SINK:
            return self._sink
        columns = list(self._columns())
        if way == BATCH:
            return lambda: self._batch_publisher(columns)
        prepared = raw_connection.prepare(columns)

        async def publish() -> int:
            return raw_connection.publish(self.port, prepared)

        return publish

    def _columns(self) -> Iterator[MessageColumns]:
        encoder = KvRowEncoder("bench", self.ids, prefix="$KV.bench.")
        for batch in self.batches:
            yield encoder.encode(batch)

    async def _sink(self) -> int:
        bucket = Bucket.of(await self.jetstream.stream_info("KV_bench"))
        async with KvBatchWriter(self.jetstream, bucket) as writer:
            for messages in self._columns():
                await writer.send(messages)
            await writer.flush()
        return writer.stored

    async def _batch_publisher(self, columns: Sequence[MessageColumns]) -> int:
        async with BatchPublisher(self.jetstream, "KV_bench") as publisher:
            for messages in columns:
                await publisher.send(messages)
            await publisher.flush()
        return publisher.stored


def run(
    size: Sequence[int] = SIZES,
    rows: int = 200_000,
    rounds: int = 5,
    plain: bool = False,
    no_spark: bool = False,
) -> dict[str, Any]:
    """The figures of all sizes, and of the sinks of Spark."""
    results = [
        asyncio.run(measure(one, headers=headers, rows=rows, rounds=rounds))
        for one in size
        for headers in ((False,) if plain else (False, True))
    ]
    if no_spark:
        return {"writing": results}
    sinks = spark_write.measure(5 * rows, rounds)
    return {"writing": results, "spark": sinks}
