"""A table with each version of each key (SCD type 2): ``python -m examples.history``.

A bucket has the place of each truck. The table answers where they were at any time that it has
followed, also after the bucket has dropped the revision.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from examples import local
from nats_stream_source.delta import follow
from nats_stream_source.jetstream import KeyValue, KeyValueConfig, connect

JOURNEY = [("truck.1", "Rome"), ("truck.2", "Oslo"), ("truck.1", "Bern"), ("truck.1", "Lyon")]


async def drive(servers: str) -> list[int]:
    """Write the journey, then retire truck 2; returns the revisions."""
    async with connect(servers) as jetstream:
        fleet = await KeyValue.create_bucket(jetstream, KeyValueConfig("fleet", history=16))
        revisions = [await fleet.put(truck, place.encode()) for truck, place in JOURNEY]
        return [*revisions, await fleet.delete("truck.2")]


def places(table: Path, revision: int) -> dict[str, str]:
    """The place of each truck when the bucket had this revision."""
    fleet = QueryBuilder().register("fleet", DeltaTable(str(table)))
    rows = fleet.execute(
        f"""SELECT key, value FROM fleet
        WHERE "__START_AT"['revision'] <= {revision}
        AND ("__END_AT" IS NULL OR "__END_AT"['revision'] > {revision})"""
    )
    return {row["key"]: row["value"].decode() for row in pa.table(rows).to_pylist()}


def main(spark: SparkSession, servers: str, directory: Path) -> None:
    """Follow the bucket into the table, and query it."""
    table = directory / "fleet_history"
    revisions = asyncio.run(drive(servers))
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
    for revision in revisions:
        print(f"revision {revision}: {places(table, revision)}")
    assert places(table, revisions[1]) == {"truck.1": "Rome", "truck.2": "Oslo"}
    assert places(table, revisions[-1]) == {"truck.1": "Lyon"}


if __name__ == "__main__":
    local.run(main)
