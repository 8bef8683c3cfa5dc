"""Checkpoint directories as Spark writes them, made by hand, and the offsets that go into them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nats_stream_source.connection.connection import ConnectionSettings
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.options import KvOptions, StreamOptions, kv_options, stream_options
from nats_stream_source.rows.formats import format_adapter
from nats_stream_source.rows.offsets import Offset
from nats_stream_source.spark.planning.query_planner import QueryPlanner


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

    def planner_of(link: ReusableConnection, **limits: str) -> QueryPlanner:
        options = {"servers": url, **given, **limits}
        parsed: KvOptions | StreamOptions = (
            kv_options(options) if "bucket" in given else stream_options(options)
        )
        return QueryPlanner(format_adapter(parsed), link)

    async def work() -> list[Offset]:
        link = ReusableConnection(ConnectionSettings(servers=(url,)))
        try:
            found = [await planner_of(link).initial_offset()]
            for limit in rows:
                limits = {} if limit is None else {"maxRowsPerTrigger": str(limit)}
                planner = planner_of(link, **limits)
                found.append(await planner.latest_offset(found[-1]))
            return found[1:]
        finally:
            await link.drop()

    return asyncio.run(work())
