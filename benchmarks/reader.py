"""The rate of one reader: a range of a bucket into Arrow, compared with a bare socket and nats-py.

``python -m benchmarks.reader [--quick] [--json FILE] [--size 128 ...] [--rounds 5]``

For each value size, with and without headers, the benchmark fills a new bucket on a new server.
Then two readers alternate for several rounds: the bare socket (a push consumer whose bytes are
received into one buffer and counted, without parsing) and the reader (``OrderedReader`` and the
rows of ``nats_kv``; the record batches are counted and dropped). Server and reader share the cores.
The ratio is that of the medians; the CPU time per row of both processes explains it. In the same
rounds nats-py reads fewer messages of the same kind, with a callback that counts them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nats
from nats.aio.msg import Msg

from benchmarks.support.bucket_data import create_bucket
from benchmarks.support.machine import Run, Stopwatch
from benchmarks.support.output import finish
from benchmarks.support.raw_connection import Message, drain, fill, server_for_slow_clients
from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.options import kv_options
from nats_stream_source.rows.kv import KvFormat
from nats_stream_source.rows.splits import Split
from nats_stream_source.spark.runner import Runner
from nats_stream_source.wire.framing import scanner

SIZES = (16, 128, 1024, 16384)
_KEYS = 100_000
_MAX_BYTES = 400 << 20
_CALLBACK = 10  # nats-py gets one message in so many


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of the rounds for one kind of message.

    ``callback`` is nats-py's messages per second, ``rounds`` the ratios of the single rounds.
    """

    size: int
    headers: bool
    rows: int
    bare: Run
    scanner: str
    reader: Run
    callback: float
    rounds: list[float]

    @property
    def ratio(self) -> float:
        """Reader ÷ bare socket, of the medians."""
        return self.reader.rate / self.bare.rate

    @property
    def cpu_ratio(self) -> float:
        """The ratio if both cores are busy, by CPU time of both, independent of other processes."""
        bare, reader = self.bare, self.reader
        return (bare.own_cpu + bare.server_cpu) / (reader.own_cpu + reader.server_cpu)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "ratio": self.ratio,
            "cpu_ratio": self.cpu_ratio,
            "over_callback": self.reader.rate / self.callback,
        }


def measure(size: int, headers: bool, rounds: int, rows: int) -> Result:
    """Fill a bucket and read it ``rounds`` times in each way, alternately.

    Args:
        size: bytes of every value.
        headers: whether every message has a header.
        rows: how many messages; fewer if the values are large.
    """
    rows = min(rows, _MAX_BYTES // (size + 120))
    with server_for_slow_clients() as server:
        stream, created = _fill(server, "bench", size, headers, rows)
        expected = drain(server.port, stream, rows)
        bare: list[Run] = []
        reader: list[Run] = []
        callback: list[float] = []
        runner = Runner(ConnectionSettings(servers=(server.url,)))
        try:
            _read(runner, stream, created, rows)  # warm-up: connection, imports
            for _ in range(rounds):
                with Stopwatch(server.pid) as watch:
                    drain(server.port, stream, rows, expected)
                bare.append(watch.run(rows))
                with Stopwatch(server.pid) as watch:
                    _read(runner, stream, created, rows)
                reader.append(watch.run(rows))
                callback.append(asyncio.run(_callback(server.url, rows)))
        finally:
            runner.close()
    pairs = [one.rate / other.rate for one, other in zip(reader, bare, strict=True)]
    return Result(
        size,
        headers,
        rows,
        Run.median(bare),
        scanner.selected(),
        Run.median(reader),
        statistics.median(callback),
        pairs,
    )


def _fill(server: NatsServer, bucket: str, size: int, headers: bool, rows: int) -> tuple[str, str]:
    stream = f"KV_{bucket}"
    created = create_bucket(server.port, bucket, history=64)
    fill(server.port, _messages(bucket, size, headers, rows))
    return stream, created


def _messages(bucket: str, size: int, headers: bool, rows: int) -> Iterator[Message]:
    # Random bytes with line ends: text without line ends would be faster to frame than real values.
    values = [random.Random(i).randbytes(size) for i in range(64)]
    for i in range(rows):
        block = b"NATS/1.0\r\nNats-Expected-Stream: %s\r\nTrace: %012d\r\n\r\n"
        block %= (f"KV_{bucket}".encode(), i)
        yield f"$KV.{bucket}.key.{i % _KEYS}", block if headers else b"", values[i % 64]


def _read(runner: Runner, stream: str, created: str, rows: int) -> None:
    query = KvFormat(kv_options({"servers": "nats://127.0.0.1", "bucket": "bench"}))
    split = Split(
        RangeRequest(stream, KnownStream(created), 0, rows), "$KV.bench.", initial_through=0
    )
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
    inbox = client.new_inbox()
    # Without a limit: messages above it would be dropped.
    await client.subscribe(inbox, cb=received, pending_msgs_limit=0, pending_bytes_limit=0)
    config = {
        "deliver_subject": inbox,
        "ack_policy": "none",
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": rows - few + 1,
    }
    request = json.dumps({"stream_name": "KV_bench", "config": config}).encode()
    answer = json.loads((await client.request("$JS.API.CONSUMER.CREATE.KV_bench", request)).data)
    if "error" in answer:
        raise RuntimeError(f"could not create the consumer of nats-py: {answer['error']}")
    await asyncio.wait_for(done.wait(), 60)
    rate = count / (time.perf_counter() - began)
    await client.close()
    return rate


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON if asked for; the last line is the 128-byte ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="128 bytes only, few rounds")
    parser.add_argument("--size", type=int, action="append", help="bytes of a value (repeatable)")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--headers", choices=["no", "yes", "both"], default="both")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    sizes = options.size or ([128] if options.quick else SIZES)
    rounds = options.rounds or (3 if options.quick else 7)
    rows = min(options.rows, 200_000) if options.quick else options.rows
    kinds = {"no": [False], "yes": [True], "both": [False, True]}[options.headers]
    results = [measure(size, headers, rounds, rows) for size in sizes for headers in kinds]
    finish("reader", {"reader": [one.as_dict() for one in results]}, options.json)
    for one in results:
        if one.size == 128 and not one.headers:
            print(f"reader / bare socket, 128 B: {one.ratio:.2f}")


if __name__ == "__main__":
    main()
