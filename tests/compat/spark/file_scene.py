"""A scene whose sink runs in another process, as over Spark Connect: it writes rows to files."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row

from tests.support.spark.scenario import Scene, Start

# The process that runs the sink has none of the tests' modules.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class SinkError(Exception):
    """What the sink raises in place of ``scenario.SinkError``."""


def file_sink(directory: Path, fail_on_batch: int | None) -> Callable[[DataFrame, int], None]:
    """A sink that keeps each attempt of a micro-batch in a file, named by when it came."""

    def write(batch: DataFrame, batch_id: int) -> None:
        rows = [row.asDict() for row in batch.collect()]
        partial = directory / "partial"
        partial.write_bytes(pickle.dumps(rows))
        os.replace(partial, directory / f"{time.time_ns()}-{batch_id}.attempt")
        if batch_id == fail_on_batch:
            raise SinkError(f"the sink fails on micro-batch {batch_id}")

    return write


class FileScene(Scene):
    """A scene that finds its attempts in files."""

    @property
    def attempts(self) -> list[tuple[int, list[Row]]]:
        return [
            (
                int(file.stem.partition("-")[2]),
                [Row(**row) for row in pickle.loads(file.read_bytes())],
            )
            for file in sorted(self.directory.glob("*.attempt"))
        ]

    @attempts.setter
    def attempts(self, none: list[tuple[int, list[Row]]]) -> None:
        """What the class that it is derived from begins with."""

    def sink(self, start: Start) -> Callable[[DataFrame, int], None]:
        assert start.after is None, "a sink in another process cannot call back"
        return file_sink(self.directory, start.fail_on_batch)
