"""A Spark driver that reads the copy of a work queue, and is there to be killed.

Run as a program with one argument, a JSON file::

    {"servers": "nats://…", "stream": "JOBS_COPY", "directory": …}

The query has its checkpoint in ``<directory>/checkpoint``, and writes each micro-batch to
``<directory>/rows/<batch id>.json``, which a repeated micro-batch replaces.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from nats_stream_source import register
from tests.support.spark.session import LOCAL, configured
from tests.support.spark.streaming_query import begin


def main(request: dict[str, Any]) -> None:
    directory = Path(request["directory"])
    (directory / "rows").mkdir(exist_ok=True)

    def write(batch: DataFrame, batch_id: int) -> None:
        rows = [bytes(row.data).decode() for row in batch.select("data").collect()]
        partial = directory / "partial"
        partial.write_text(json.dumps(rows))
        os.replace(partial, directory / "rows" / f"{batch_id}.json")

    spark = configured({**LOCAL, "spark.sql.warehouse.dir": str(directory / "w")}).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark, check=False)
    source = spark.readStream.format("nats_stream").option("servers", request["servers"])
    writes = (
        source.option("stream", request["stream"])
        .option("maxRowsPerTrigger", 700)
        .load()
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(directory / "checkpoint"))
    )
    begin(writes.start).awaitTermination()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
