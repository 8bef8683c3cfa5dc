"""Actions that compare the rows, micro-batches and offsets of a query with the expected ones."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.support.nats import buckets
from tests.support.spark.scenario.scene import KV, Scene, shown


class ExpectRows:
    """Compare all rows that the query has delivered since the start of the scene."""

    def __init__(self, *rows: str) -> None:
        self.expected = list(rows)

    def __repr__(self) -> str:
        return f"ExpectRows({len(self.expected)})"

    def run(self, scene: Scene) -> None:
        assert [shown(row) for row in scene.rows] == self.expected


class ExpectMessages(ExpectRows):
    """Compare all rows as ``<sequence> <key>=<value>`` in both formats; without markers."""

    def run(self, scene: Scene) -> None:
        assert [
            re.sub(" PUT | initial$", _plain, shown(row)) for row in scene.rows
        ] == self.expected


def _plain(matched: re.Match[str]) -> str:
    return " " if matched[0].endswith(" ") else ""


@dataclass(frozen=True)
class ExpectInitialThrough:
    """Compare End-Of-Initial-Data in all offsets of the checkpoint and in the rows."""

    sequence: int

    def run(self, scene: Scene) -> None:
        offsets = scene.offsets()
        assert offsets, "no offset is logged"
        assert {offset["initial_through"] for offset in offsets} == {self.sequence}
        if scene.format == KV:
            assert all(row.initial == (row.revision <= self.sequence) for row in scene.rows)


@dataclass(frozen=True)
class ExpectBatches:
    """Compare the number of rows of each micro-batch that has rows."""

    sizes: tuple[int, ...]

    def run(self, scene: Scene) -> None:
        assert tuple(len(rows) for rows in scene.batches.values() if rows) == self.sizes


@dataclass(frozen=True)
class ExpectNoConsumers:
    """Expect no consumer on the server: a reader deletes its consumer after its range."""

    def run(self, scene: Scene) -> None:
        names = buckets.api(scene.url, f"CONSUMER.NAMES.{scene.stream}").get("consumers")
        assert not names
