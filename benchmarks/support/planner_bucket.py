"""The bucket of the planner benchmark, and planners that read it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from nats.aio.client import Client

from benchmarks.support.bucket_data import fill_bucket
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import BucketNotFoundError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.bucket import bucket_stream_info
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.options import kv_options
from nats_stream_source.rows.kv import KvFormat
from nats_stream_source.rows.offsets import Offset, Position
from nats_stream_source.spark.planning.query_planner import QueryPlanner

BUCKET = "big"
KEYS = {
    "none": "",
    "one narrow": "p007.*",
    "fifty": ",".join(f"p{i:03}.*" for i in range(50)),
}
_GROUPS = 1000  # first tokens of keys: a filter for one of them matches a thousandth


def fill(server: NatsServer, messages: int, keys: int) -> None:
    """Create and fill the bucket, unless the server's store has it.

    Raises:
        RuntimeError: the server stopped accepting entries.
    """

    async def exists() -> bool:
        link = ReusableConnection(kv_options({"servers": server.url, "bucket": BUCKET}).connection)
        try:
            await bucket_stream_info(JetStream(await link.connection()), BUCKET)
        except BucketNotFoundError:
            return False
        finally:
            await link.drop()
        return True

    if asyncio.run(exists()):
        return
    try:
        fill_bucket(server.port, BUCKET, _pairs(messages, keys), history=1)
    except OSError as error:
        raise RuntimeError(f"could not fill the bucket: {error}") from error


def _pairs(messages: int, keys: int) -> Iterator[tuple[str, bytes]]:
    chance = random.Random(1)
    for i in range(messages):
        key = chance.randrange(keys)
        yield f"p{key % _GROUPS:03}.k{key}", b"%032d" % i


@asynccontextmanager
async def planning(url: str, **options: str) -> AsyncIterator[QueryPlanner]:
    """A planner for the bucket, as in a new process."""
    configured = {"servers": url, "bucket": BUCKET} | {k: v for k, v in options.items() if v}
    parsed = kv_options(configured)
    link = ReusableConnection(parsed.connection)
    try:
        yield QueryPlanner(KvFormat(parsed), link)
    finally:
        await link.drop()


def position_of(offset: Offset) -> Position:
    """The position of an offset of one stream."""
    (position,) = offset.streams.values()
    return position


def moved(offset: Offset, seq: int) -> Offset:
    """The offset of a query that starts after ``seq``."""
    streams = {name: replace(at, origin=seq, stream_seq=seq) for name, at in offset.streams.items()}
    return replace(offset, streams=streams)


class Requests:
    """Counts the requests of all planners of this process, without puts to the bucket."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Requests:
        self._publish = Client.publish

        async def publish(client: Client, subject: str, *args: Any, **named: Any) -> None:
            self.count += not subject.startswith("$KV.")
            await self._publish(client, subject, *args, **named)

        Client.publish = publish  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Client.publish = self._publish
