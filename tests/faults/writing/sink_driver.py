"""A Spark driver that is there to be killed: a query that copies a bucket into a stream.

Run as a program with one argument, a JSON object: ``servers`` and ``bucket`` of the source, and the
``options`` and ``checkpoint`` of the sink.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source import register
from tests.support.spark.session import LOCAL, configured
from tests.support.spark.streaming_query import begin

ROWS = 500
"""Maximum number of rows of a micro-batch."""


def start(spark: SparkSession, request: dict[str, Any]) -> StreamingQuery:
    """Start the query; it ends with what the bucket has at its start."""
    source = spark.readStream.format("nats_kv").option("servers", request["servers"])
    source = source.options(bucket=request["bucket"], includeHistory=True, maxRowsPerTrigger=ROWS)
    rows = source.load().selectExpr("concat('out.', key) AS subject", "value AS data")
    sink = rows.writeStream.format("nats_stream").options(**request["options"])
    sink = sink.option("checkpointLocation", request["checkpoint"]).trigger(availableNow=True)
    return begin(sink.start)


def main(request: dict[str, Any]) -> None:
    spark = configured(LOCAL).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    register(spark, check=False)
    start(spark, request).awaitTermination()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
