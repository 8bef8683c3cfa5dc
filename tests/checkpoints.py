"""Checkpoint directories as Spark writes them, made by hand, and the offsets that go into them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nats_stream_source.jetstream.connection import ConnectionSettings
from nats_stream_source.jetstream.link import Link
from nats_stream_source.options import KvOptions, StreamOptions, kv_options, stream_options
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.planner import Planner
from nats_stream_source.source.query import query_of


@dataclass
class Checkpoint:
    """A checkpoint directory, written file by file as Spark does."""

    path: Path

    def __post_init__(self) -> None:
        for name in ("offsets", "commits"):
            (self.path / name).mkdir(parents=True)
        (self.path / "metadata").write_text('{"id":"4e1cf4d2-0000-0000-0000-000000000001"}')

    def plan(self, batch: int, *sources: Offset | str, version: str = "v1") -> None:
        lines = [one if isinstance(one, str) else json.dumps(one.to_json()) for one in sources]
        (self.path / "offsets" / str(batch)).write_text("\n".join([version, "{}", *lines]))
        (self.path / "offsets" / f".{batch}.crc").write_bytes(b"crc")

    def commit(self, batch: int) -> None:
        (self.path / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')

    def committed(self, *sources: Offset | str) -> None:
        """One micro-batch, planned and committed."""
        self.plan(0, *sources)
        self.commit(0)


def ends(url: str, rows: Sequence[int | None], **given: str) -> list[Offset]:
    """The ends of a query's first micro-batches, by the planner; each with its limit of rows.

    ``given`` are the query's options, of a bucket or of a stream.
    """
    options: KvOptions | StreamOptions = (
        kv_options({"servers": url, **given})
        if "bucket" in given
        else stream_options({"servers": url, **given})
    )

    async def work() -> list[Offset]:
        link = Link(ConnectionSettings(servers=(url,)))
        try:
            planner = Planner(query_of(options), link)
            found = [await planner.initial()]
            for limit in rows:
                found.append(await planner.latest(found[-1], limit))
            return found[1:]
        finally:
            await link.drop()

    return asyncio.run(work())
