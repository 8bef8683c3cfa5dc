"""A table with each version of each key (SCD type 2): ``python -m examples.history``.

A bucket has the place of each truck. The table answers where they were at any time that it has
followed, also after the bucket has dropped the revision.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from examples import local
from nats_stream_source.delta import follow
from nats_stream_source.jetstream import KeyValue, KeyValueConfig, connect

JOURNEY = [("truck.1", "Rome"), ("truck.2", "Oslo"), ("truck.1", "Bern"), ("truck.1", "Lyon")]


async def drive(servers: str) -> list[datetime]:
    """Write the journey, then retire truck 2; returns the times of the entries."""
    async with connect(servers) as jetstream:
        fleet = await KeyValue.create_bucket(jetstream, KeyValueConfig("fleet", history=16))
        for truck, place in JOURNEY:
            await fleet.put(truck, place.encode())
        await fleet.delete("truck.2")
        entries = [*await fleet.history("truck.1"), *await fleet.history("truck.2")]
        return sorted(entry.created for entry in entries)


def places(table: Path, time: datetime) -> dict[str, str]:
    """The place of each truck at a time."""
    fleet = QueryBuilder().register("fleet_history", DeltaTable(str(table)))
    rows = fleet.execute(
        f"""SELECT key, value FROM fleet_history
        WHERE valid_from <= '{time}' AND (valid_to IS NULL OR valid_to > '{time}')"""
    )
    return {row["key"]: row["value"].decode() for row in pa.table(rows).to_pylist()}


def main(spark: SparkSession, servers: str, directory: Path) -> None:
    """Follow the bucket into the table, and query it."""
    table = directory / "fleet_history"
    times = asyncio.run(drive(servers))
    changes = (
        spark.readStream.format("nats_kv")
        .options(servers=servers, bucket="fleet", includeHistory=True)
        .load()
    )
    query = follow(
        changes,
        str(table),
        checkpoint=str(directory / "checkpoint"),
        stored_as_scd_type=2,
        once=True,  # without it, the table follows the bucket
    )
    query.awaitTermination()
    for time in times:
        print(f"{time}: {places(table, time)}")
    assert places(table, times[1]) == {"truck.1": "Rome", "truck.2": "Oslo"}
    assert places(table, times[-1]) == {"truck.1": "Lyon"}


if __name__ == "__main__":
    local.run(main)
