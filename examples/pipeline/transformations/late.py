"""A sink: late planes go into the bucket ``late``, which the sink creates."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame
from pyspark.sql.functions import col, concat_ws

SERVERS = os.environ.get("NATS_URL", "nats://127.0.0.1:4222")

dp.create_sink("late", "nats_kv", {"servers": SERVERS, "bucket": "late", "ifMissing": "create"})


@dp.append_flow(target="late")
def late_reports() -> DataFrame:
    late = spark.readStream.table("reports").where("delay >= 60")
    # The key has the sequence: a row that is written again after a crash changes nothing.
    return late.select(
        concat_ws(".", "plane", "sequence").alias("key"),
        col("delay").cast("string").cast("binary").alias("value"),
    )
