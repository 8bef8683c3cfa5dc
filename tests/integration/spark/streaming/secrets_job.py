"""A Spark job with secrets in its options, in a process of its own, so that all it prints is seen.

``python -m tests.integration.spark.streaming.secrets_job URL DIRECTORY OPTIONS``: OPTIONS is a JSON
list of objects of options. With the first two it runs queries, of the first four it prints what
Spark shows, and with the others it only connects.
"""

from __future__ import annotations

import json
import pickle
import sys
import traceback
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from nats_stream_source import register
from nats_stream_source.spark.datasource import NatsKvDataSource
from tests.support.spark.session import LOCAL, configured
from tests.support.spark.streaming_query import begin


def main() -> None:
    url, directory, ways = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    events = directory / "events"
    events.mkdir()
    settings = {
        **LOCAL,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": str(events),
    }
    spark = configured(settings).getOrCreate()
    spark.sparkContext.setLogLevel("INFO")
    register(spark)
    for i, options in enumerate(ways):
        try:
            show(spark, i, directory / f"checkpoint{i}", {"servers": url, **options})
        except Exception:
            # Errors are what this job is for: all of them are printed, and looked at by the test.
            traceback.print_exc()
    spark.stop()


def show(spark: SparkSession, i: int, checkpoint: Path, options: dict[str, str]) -> None:
    options = {"bucket": "fleet", "connectTimeout": "2", **options}
    reader = NatsKvDataSource(options).streamReader(StructType())
    again = pickle.loads(pickle.dumps(reader))
    print("OURS", repr(reader), repr(again), vars(again))
    if i > 3:
        reader.initialOffset()
    frame = spark.readStream.format("nats_kv").options(**options).load()
    frame.explain(extended=True)
    print("PLAN", frame._jdf.queryExecution().toString(), repr(frame))
    if i > 1:
        reader.initialOffset()
    query = begin(
        frame.writeStream.format("noop")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start
    )
    try:
        query.awaitTermination(60)
    except Exception:
        # As above: what Spark says of a query that failed is what is looked at.
        traceback.print_exc()
    query.explain(extended=True)
    print(f"QUERY {i}", query.exception(), query.lastProgress, query.status)


if __name__ == "__main__":
    main()
