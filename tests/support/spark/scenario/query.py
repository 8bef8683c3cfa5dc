"""Actions that start, stop and wait for the query."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from tests.support.spark.scenario.scene import DEADLINE, Action, Scene, shown
from tests.support.spark.streaming_query import begin
from tests.support.wait import wait_until

LIVE: Mapping[str, Any] = {"processingTime": "50 milliseconds"}


class SinkError(Exception):
    """The error that ``Start(fail_on_batch=…)`` raises in the sink."""


@dataclass(frozen=True)
class Start:
    """Start the query.

    Attributes:
        options: options of the source, besides ``servers`` and ``bucket``.
        trigger: keyword arguments of ``DataStreamWriter.trigger``.
        fail_on_batch: the sink raises once, after it received this micro-batch.
        before, after: called in the sink for each micro-batch, with its id, before and after its
            rows are read.
        sink: replaces the sink that collects the rows.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    trigger: Mapping[str, Any] = field(default_factory=lambda: LIVE)
    fail_on_batch: int | None = None
    before: Callable[[int], None] | None = None
    after: Callable[[int], None] | None = None
    sink: Callable[[DataFrame, int], None] | None = None

    def run(self, scene: Scene) -> None:
        assert scene.query is None, "a query is already running"
        scene.options = dict(self.options)
        scene.query = begin(
            read(scene, self.options)
            .writeStream.foreachBatch(self.sink or scene.sink(self))
            .trigger(**self.trigger)
            .option("checkpointLocation", str(scene.checkpoint))
            .start
        )

    def collect(self, scene: Scene) -> Callable[[DataFrame, int], None]:
        """Return a sink that collects the rows of micro-batches in the scene."""

        def collect(batch: DataFrame, batch_id: int) -> None:
            if self.before is not None:
                self.before(batch_id)
            scene.attempts.append((batch_id, batch.collect()))
            if self.after is not None:
                self.after(batch_id)
            if batch_id == self.fail_on_batch:
                raise SinkError(f"the sink fails on micro-batch {batch_id}")

        return collect


def read(scene: Scene, options: Mapping[str, Any]) -> DataFrame:
    """Return the streaming DataFrame of the bucket or stream; None removes an option."""
    given = {name: v for name, v in {**scene.source, **options}.items() if v is not None}
    return scene.spark.readStream.format(scene.format).options(**given).load()


@dataclass(frozen=True)
class Wait:
    """Wait until the query has delivered ``rows`` rows since the start of the scene."""

    rows: int

    def run(self, scene: Scene) -> None:
        wait_until(
            lambda: len(scene.rows) >= self.rows,
            f"{self.rows} rows",
            alive=lambda: _alive(scene),
            seen=lambda: [shown(row) for row in scene.rows],
            deadline=600,
        )


@dataclass(frozen=True)
class WaitForBatch:
    """Wait until micro-batch ``batch_id`` is committed in the checkpoint, empty or not."""

    batch_id: int

    def run(self, scene: Scene) -> None:
        committed = scene.checkpoint / "commits" / str(self.batch_id)
        wait_until(
            committed.exists,
            f"micro-batch {self.batch_id}",
            alive=lambda: _alive(scene),
            deadline=600,
        )


@dataclass(frozen=True)
class Stop:
    """Stop the query."""

    def run(self, scene: Scene) -> None:
        assert scene.query is not None, "no query runs"
        _alive(scene)
        scene.close()


@dataclass(frozen=True)
class Restart:
    """Stop the query and start it again with the same options."""

    def run(self, scene: Scene) -> None:
        Stop().run(scene)
        Start(scene.options).run(scene)


@dataclass(frozen=True)
class Run:
    """Run the query with ``Trigger.AvailableNow`` to its end; ``options`` as in ``Start``."""

    options: Mapping[str, Any] = field(default_factory=dict)
    after: Callable[[int], None] | None = None

    def run(self, scene: Scene) -> None:
        Start(self.options, trigger={"availableNow": True}, after=self.after).run(scene)
        assert scene.query is not None
        assert scene.query.awaitTermination(int(DEADLINE)), "AvailableNow did not end"
        scene.close()


@dataclass(frozen=True)
class ExpectError:
    """Expect that the query, or ``action`` if it is given, fails.

    Attributes:
        name: name of the error's class.
        fragments: strings that the text of the error must contain.
        action: the action that must fail.
        rows: number of all rows afterwards; default: as many as before.
        absent: strings that the text must not contain, such as secrets.
    """

    name: str
    fragments: tuple[str, ...] = ()
    action: Action | None = None
    rows: int | None = None
    absent: tuple[str, ...] = ()

    def run(self, scene: Scene) -> None:
        before = len(scene.rows)
        text = self._text(scene)
        assert re.search(rf"\b{self.name}: ", text), text
        for fragment in self.fragments:
            assert fragment in text, text
        for secret in self.absent:
            assert secret not in text, "the text of the error contains a secret"
        assert len(scene.rows) == (before if self.rows is None else self.rows), "partial output"

    def _text(self, scene: Scene) -> str:
        try:
            if self.action is not None:
                self.action.run(scene)
            elif scene.query is not None:
                assert scene.query.awaitTermination(int(DEADLINE)), "the query did not fail"
        except PySparkException as error:
            return str(error)
        finally:
            scene.close()
        raise AssertionError(f"no {self.name}")


def _alive(scene: Scene) -> None:
    """Raise the query's error if it has failed."""
    assert scene.query is not None, "no query runs"
    error = scene.query.exception()
    if error is not None:
        raise error
