"""A Spark driver that is there to be killed: queries that stop between reading and committing.

Run as a program with one argument, a JSON file::

    {"servers": "nats://…", "queries": [{"bucket": …, "options": {…}, "block_on": 1,
                                         "directory": …}, …]}

Each query has its checkpoint in ``<directory>/checkpoint`` and writes each micro-batch to
``<directory>/<batch id>.json``. After the micro-batch ``block_on`` was written, its sink never
returns, so that micro-batch is planned, read and not committed.

The program also shows what ``register`` is for: it hides the module that Spark would find the
format by, and writes to ``<directory>/lookup`` what Spark reports before ``register`` was called.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame

from nats_stream_source import register
from tests.support.spark.session import LOCAL, configured
from tests.support.spark.streaming_query import begin

# Workers import this at their start: the module that looks for data sources finds none.
HIDE_FORMATS = """
import pkgutil
_all = pkgutil.iter_modules
pkgutil.iter_modules = lambda *a, **k: (
    m for m in _all(*a, **k) if not m.name.startswith("pyspark_nats_")
)
"""


def sink(directory: Path, block_on: int) -> Callable[[DataFrame, int], None]:
    def write(batch: DataFrame, batch_id: int) -> None:
        rows = [[row.revision, row.operation, row.key] for row in batch.collect()]
        partial = directory / "partial"
        partial.write_text(json.dumps(rows))
        os.replace(partial, directory / f"{batch_id}.json")
        if batch_id == block_on:
            threading.Event().wait()

    return write


def main(request: dict[str, Any], scratch: Path) -> None:
    (scratch / "sitecustomize.py").write_text(HIDE_FORMATS)
    paths = [str(scratch), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    settings = {**LOCAL, "spark.sql.warehouse.dir": str(scratch / "warehouse")}
    spark = configured(settings).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        spark.readStream.format("nats_kv").load()
        said = "found"
    except Py4JJavaError as error:  # PySpark has no class of its own for this one
        said = str(error.java_exception.getMessage())
    (scratch / "lookup").write_text(said)
    register(spark, check=False)  # these processes start often
    queries = []
    for query in request["queries"]:
        directory = Path(query["directory"])
        writes = (
            spark.readStream.format("nats_kv")
            .options(servers=request["servers"], bucket=query["bucket"], **query["options"])
            .load()
            .writeStream.foreachBatch(sink(directory, query["block_on"]))
            .option("checkpointLocation", str(directory / "checkpoint"))
        )
        queries.append(begin(writes.start))
    spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    main(json.loads(path.read_text()), path.parent)
