"""Runs AUTO CDC of Spark's declarative pipelines on batches of events.

``SPARK_REMOTE=URL python -m tests.compat.spark.auto_cdc.program DIRECTORY``, with a Spark Connect
server at the URL. The directory has ``batches.json`` and the pipeline ``spark-pipeline.yml``. Each
batch becomes a file of the source and an update of the pipeline; the rows of the tables after each
batch are written to ``rows.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.pipelines.cli import run
from pyspark.sql import SparkSession

from tests.compat.spark.auto_cdc import COLUMNS


@contextmanager
def session() -> Iterator[SparkSession]:
    """A session of its own: each update of the pipeline stops the one it has used."""
    spark = SparkSession.builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def main(directory: Path) -> None:
    """Run the pipeline once for each batch."""
    with session() as spark:
        spark.sql("CREATE NAMESPACE default")
    after = []
    for number, batch in enumerate(json.loads((directory / "batches.json").read_text())):
        lines = "\n".join(json.dumps(event) for event in batch)
        (directory / "events" / f"{number}.json").write_text(lines)
        run(directory / "spark-pipeline.yml", [], False, [], False)
        with session() as spark:
            tables = {name: spark.table(f"default.{name}") for name in COLUMNS}
            rows = {name: tables[name].select(*COLUMNS[name]).collect() for name in COLUMNS}
        after.append({name: [[*row] for row in rows[name]] for name in COLUMNS})
    (directory / "rows.json").write_text(json.dumps(after))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
