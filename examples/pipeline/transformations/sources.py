"""Streaming tables: each micro-batch appends a range of the stream, each row once."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame
from pyspark.sql.functions import col, from_json

SERVERS = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")
ROWS = int(os.environ.get("MAX_ROWS", "100000"))


@dp.table(comment="all changes of the bucket fleet: key, value, operation, revision")
def fleet_changes() -> DataFrame:
    entries = (
        spark.readStream.format("nats_kv")
        .options(servers=SERVERS, bucket="fleet", includeHistory=True, maxRowsPerTrigger=ROWS)
        .load()
    )
    return entries.withColumn("airport", col("value").cast("string")).drop("value")


@dp.table(comment="the messages of the stream REPORTS")
def reports() -> DataFrame:
    messages = (
        spark.readStream.format("nats_stream")
        .options(servers=SERVERS, stream="REPORTS", maxRowsPerTrigger=ROWS)
        .load()
    )
    report = from_json(col("data").cast("string"), "plane STRING, delay INT")
    return messages.select("sequence", "timestamp", report.alias("report")).select(
        "sequence", "timestamp", "report.*"
    )
