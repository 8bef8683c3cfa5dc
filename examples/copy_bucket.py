"""A bucket that follows another one: ``python -m examples.copy_bucket``.

The query copies the puts and deletes of some keys, with their headers, into a bucket of the same or
of another server. It resumes at its checkpoint; within the duplicate window of the copy's stream,
``messageId=auto`` keeps an entry from being written twice after a crash.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from examples import local
from nats_stream_source.jetstream import KeyValue, KeyValueConfig, connect


async def write(servers: str) -> None:
    """Write three trucks of which one is deleted again, and a key that is not copied."""
    async with connect(servers) as jetstream:
        fleet = await KeyValue.create_bucket(jetstream, KeyValueConfig("fleet", history=5))
        for key in ("eu.truck.1", "eu.truck.2", "eu.truck.3", "us.truck.1"):
            await fleet.put(key, b"moving")
        await fleet.delete("eu.truck.2")


def copy(spark: SparkSession, source: str, target: str, checkpoint: Path) -> None:
    """Copy what is new to the bucket ``fleet-eu`` of ``target``."""
    query = (
        spark.readStream.format("nats_kv")
        .options(servers=source, bucket="fleet", keys="eu.>", includeHeaders=True)
        .load()
        .writeStream.format("nats_kv")
        .options(servers=target, bucket="fleet-eu", ifMissing="create", messageId="auto")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)  # without it, the copy follows the bucket
        .start()
    )
    query.awaitTermination()


def keys(spark: SparkSession, servers: str, bucket: str) -> list[str]:
    """The keys of a bucket in order."""
    entries: DataFrame = (
        spark.read.format("nats_kv")
        .options(servers=servers, bucket=bucket, ignoreDeletes=True)
        .load()
    )
    return [row.key for row in entries.select("key").orderBy("key").collect()]


def main(spark: SparkSession, servers: str, directory: Path) -> None:
    """Copy a bucket twice; the second run reads nothing."""
    asyncio.run(write(servers))
    for _ in range(2):
        copy(spark, servers, servers, directory / "checkpoint")
    print(keys(spark, servers, "fleet-eu"))
    assert keys(spark, servers, "fleet-eu") == ["eu.truck.1", "eu.truck.3"]


if __name__ == "__main__":
    local.run(main)
