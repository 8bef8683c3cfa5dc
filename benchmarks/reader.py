"""The rate of one reader: a range of a bucket into Arrow, compared with a bare socket and nats-py.

For each value size, with and without headers, the benchmark fills a new bucket on a new server.
Then two readers alternate for several rounds: the bare socket (a push consumer whose bytes are
received into one buffer and counted, without parsing) and the reader (``OrderedReader`` and the
rows of ``nats_kv``; the record batches are counted and dropped). Server and reader share the cores.
The ratio is that of the medians; the CPU time per row of both processes explains it. In the same
rounds nats-py reads fewer messages of the same kind, with a callback that counts them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import nats
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from benchmarks.support.bucket_data import create_bucket, entries
from benchmarks.support.machine import Run, Stopwatch
from benchmarks.support.raw_connection import Message, drain, fill, server_for_slow_clients
from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.options import kv_options
from nats_stream_source.rows.base import Split
from nats_stream_source.rows.formats import KvFormat
from nats_stream_source.spark.runner import Runner

SIZES = (16, 128, 1024, 16384)
_KEYS = 100_000
_MAX_BYTES = 400 << 20
_CALLBACK = 10  # nats-py gets one message in so many


def measure(size: int, headers: bool, rounds: int, rows: int) -> dict[str, Any]:
    """Fill a bucket and read it ``rounds`` times in each way, alternately.

    Args:
        size: bytes of every value.
        headers: whether every message has a header.
        rows: how many messages; fewer if the values are large.

    Returns:
        Medians of the rounds. ``callback`` is nats-py's messages per second; ``cpu_ratio``, by the
        CPU time of both processes, is the ratio if both cores are busy.
    """
    rows = min(rows, _MAX_BYTES // (size + 120))
    with server_for_slow_clients() as server:
        created = create_bucket(server.port, "bench", history=64)
        fill(server.port, _messages(size, headers, rows))
        expected = drain(server.port, "KV_bench", rows)
        bare: list[Run] = []
        reader: list[Run] = []
        callback: list[float] = []
        runner = Runner(ConnectionSettings(servers=(server.url,)))
        try:
            _read(runner, created, rows)  # warm-up: connection, imports
            for _ in range(rounds):
                with Stopwatch(server.pid) as watch:
                    drain(server.port, "KV_bench", rows, expected)
                bare.append(watch.run(rows))
                with Stopwatch(server.pid) as watch:
                    _read(runner, created, rows)
                reader.append(watch.run(rows))
                callback.append(asyncio.run(_callback(server.url, rows)))
        finally:
            runner.close()
    one, other = Run.median(reader), Run.median(bare)
    cpu_ratio = (other.own_cpu + other.server_cpu) / (one.own_cpu + one.server_cpu)
    messages = statistics.median(callback)
    return {
        "size": size,
        "headers": headers,
        "rows": rows,
        "bare": asdict(other),
        "reader": asdict(one),
        "callback": messages,
        "ratio": one.rate / other.rate,
        "cpu_ratio": cpu_ratio,
        "over_callback": one.rate / messages,
    }


def _messages(size: int, headers: bool, rows: int) -> Iterator[Message]:
    for i, (key, value) in enumerate(entries(rows, _KEYS, size)):
        block = b"NATS/1.0\r\nNats-Expected-Stream: KV_bench\r\nTrace: %012d\r\n\r\n" % i
        yield f"$KV.bench.{key}", block if headers else None, value


def _read(runner: Runner, created: str, rows: int) -> None:
    query = KvFormat(kv_options({"servers": "nats://127.0.0.1", "bucket": "bench"}))
    request = RangeRequest("KV_bench", KnownStream(created), 0, rows, prefix="$KV.bench.")
    split = Split(request, initial_through=0)
    reader = OrderedReader(runner.connection, split.range)
    count = 0
    for frames in runner.iterate(reader.batches()):
        batch = query.record_batch(frames, split)
        count += batch.num_rows
    if count != rows or reader.cursor.rebuilds:
        raise RuntimeError(f"{count} rows of {rows}: {reader!r}")


async def _callback(url: str, rows: int) -> float:
    """Messages per second of a push consumer of nats-py, without the time to connect."""
    client = await nats.connect(url)
    few = max(rows // _CALLBACK, 1)
    count, done = 0, asyncio.Event()

    async def received(_: Msg) -> None:
        nonlocal count
        count += 1
        if count == few:
            done.set()

    began = time.perf_counter()
    await client.jetstream().subscribe(
        "$KV.bench.>",
        stream="KV_bench",
        cb=received,
        config=ConsumerConfig(
            ack_policy=AckPolicy.NONE,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=rows - few + 1,
        ),
        # Without a limit: messages above it would be dropped.
        pending_msgs_limit=0,
        pending_bytes_limit=0,
    )
    await asyncio.wait_for(done.wait(), 60)
    rate = count / (time.perf_counter() - began)
    await client.close()
    return rate


def run(size: Sequence[int] = SIZES, rows: int = 500_000, rounds: int = 7) -> dict[str, Any]:
    """The figures of all sizes."""
    kinds = [(one, headers) for one in size for headers in (False, True)]
    return {"reader": [measure(*kind, rounds, rows) for kind in kinds]}
