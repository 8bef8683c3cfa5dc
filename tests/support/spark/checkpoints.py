"""Checkpoint directories as Spark writes them, made by hand, and the offsets that go into them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nats_stream_source.rows.offsets import Offset
from tests.support.query_driver.driver import OffsetJson, new_query


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
    found: list[OffsetJson] = []
    for limit in rows:
        with new_query(url, maxRowsPerTrigger=limit, **given) as query:
            found.append(query.latest_offset(found[-1] if found else query.initial_offset()))
    return [Offset.parse(one) for one in found]
