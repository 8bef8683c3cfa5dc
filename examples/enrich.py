"""Measurements of a stream beside the devices of a bucket: ``python -m examples.enrich``.

``lookup`` requests the entries of exactly the devices that occur in a micro-batch. A measurement of
an unknown device stays a row, without a name.
"""

from __future__ import annotations

import json
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from examples import local
from nats_stream_source import lookup

SCHEMA = "device STRING, celsius DOUBLE"


def write(spark: SparkSession, servers: str) -> None:
    """Write two devices into a bucket and four measurements into a stream."""
    devices = spark.createDataFrame([("d1", "oven"), ("d2", "freezer")], "key STRING, value STRING")
    to_bucket = devices.write.format("nats_kv").mode("append")
    to_bucket.options(servers=servers, bucket="devices", ifMissing="create").save()
    celsius = [("d1", 220.5), ("d2", -18.0), ("d9", 3.5), ("d1", 221.0)]
    measured = [
        (f"celsius.{device}", json.dumps({"device": device, "celsius": one}))
        for device, one in celsius
    ]
    messages = spark.createDataFrame(measured, "subject STRING, data STRING").coalesce(1)
    to_stream = messages.write.format("nats_stream").mode("append")
    to_stream.options(
        servers=servers, stream="CELSIUS", subjects="celsius.>", ifMissing="create"
    ).save()


def named(spark: SparkSession, servers: str) -> DataFrame:
    """The measurements, as a stream of rows with the name of their device."""
    messages = (
        spark.readStream.format("nats_stream").options(servers=servers, stream="CELSIUS").load()
    )
    measured = messages.selectExpr(
        "sequence", f"from_json(CAST(data AS STRING), '{SCHEMA}') AS m"
    ).select("sequence", "m.*")
    found = lookup(
        measured, bucket="devices", key="device", columns={"value": "name"}, servers=servers
    )
    return found.withColumn("name", found["name"].cast("string"))


def main(spark: SparkSession, servers: str, directory: Path) -> None:
    """Write, follow the stream to its end, and print what was stored."""
    write(spark, servers)
    query = (
        named(spark, servers)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)  # without it, the query follows the stream
        .start(str(directory / "measurements"))
    )
    query.awaitTermination()
    stored = spark.read.parquet(str(directory / "measurements")).orderBy("sequence")
    stored.show()
    names = [row["name"] for row in stored.collect()]
    assert names == ["oven", "freezer", None, "oven"]


if __name__ == "__main__":
    local.run(main)
