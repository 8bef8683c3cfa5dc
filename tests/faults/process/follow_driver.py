"""A Spark driver that follows buckets into tables, and is there to be killed.

Run as a program with one argument, a JSON file::

    {"servers": "nats://…", "once": false,
     "queries": [{"options": {"bucket": …}, "arguments": {"deletes": …}, "table": …,
                  "directory": …}, …]}

Each query has its checkpoint in ``<directory>/checkpoint``. A query that fails is started again,
and its error is added to ``<directory>/errors``. With ``once`` the program ends when all queries
have read what their buckets have. The package's warnings are in ``log`` beside the JSON file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source import register
from nats_stream_source.delta import configure, follow
from tests.support.follower import Query
from tests.support.spark.processes import driver_process
from tests.support.spark.session import SMALL, configured


@contextlib.contextmanager
def following(
    scratch: Path, url: str, queries: Sequence[tuple[Query, Path, Path]], *, once: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program with these queries, their tables and directories; at the end it is killed."""
    listed = [
        {**asdict(query), "table": str(table), "directory": str(directory)}
        for query, table, directory in queries
    ]
    path = scratch / "request.json"
    path.write_text(json.dumps({"servers": url, "once": once, "queries": listed}))
    with driver_process("tests.faults.process.follow_driver", str(path)) as process:
        yield process


def start(spark: SparkSession, request: dict[str, Any], query: dict[str, Any]) -> StreamingQuery:
    source = spark.readStream.format("nats_kv").options(servers=request["servers"])
    return follow(
        source.options(**query["options"]).load(),
        query["table"],
        checkpoint=f"{query['directory']}/checkpoint",
        once=request["once"],
        engine="driver",
        upkeep=None,
        **query["arguments"],
    )


def main(request: dict[str, Any], scratch: Path) -> None:
    settings = {**SMALL, "spark.sql.warehouse.dir": str(scratch / "warehouse")}
    logging.basicConfig(filename=scratch / "log")
    spark = configure(configured(settings)).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    register(spark, check=False)  # these processes start often
    running = [(query, start(spark, request, query)) for query in request["queries"]]
    while running:
        time.sleep(0.1)
        for index, (query, started) in enumerate(running):
            if started.isActive:
                continue
            try:
                started.awaitTermination()
            except StreamingQueryException as error:
                with Path(query["directory"], "errors").open("a") as errors:
                    errors.write(f"{error}\0")
                running[index] = (query, start(spark, request, query))
            else:
                del running[index]
                break


if __name__ == "__main__":
    path = Path(sys.argv[1])
    main(json.loads(path.read_text()), path.parent)
