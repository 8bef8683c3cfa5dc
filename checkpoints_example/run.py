"""The files of a checkpoint, and their use: stop, restart, replay, lag.

    python checkpoints_example/run.py [DIRECTORY]

The example starts a server, writes a few keys, and runs small queries on them. It keeps the
checkpoint in DIRECTORY if this argument is given.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import nats
from nats.js.api import KeyValueConfig
from pyspark.sql import DataFrame, SparkSession

from examples.demo.query import start_session
from nats_stream_source.embedded import NatsServer

BUCKET = "plant"


async def write(url: str, entries: list[tuple[str, bytes | None]]) -> None:
    """Put each value to its key, one after the other; the value None deletes the key."""
    client = await nats.connect(url)
    config = KeyValueConfig(bucket=BUCKET, history=5, direct=True)
    bucket = await client.jetstream().create_key_value(config=config)
    for key, value in entries:
        await (bucket.delete(key) if value is None else bucket.put(key, value))
    await client.close()


def run(spark: SparkSession, url: str, checkpoint: Path, **options: Any) -> list[Any]:
    """Read all entries, print them batch by batch, stop; returns Spark's progress reports."""

    def show(batch: DataFrame, batch_id: int) -> None:
        for row in batch.orderBy("revision").collect():
            value = None if row.value is None else row.value.decode()
            print(
                f"    batch {batch_id}: revision {row.revision} {row.operation} {row.key} {value}"
            )

    query = (
        spark.readStream.format("nats_kv")
        .option("servers", url)
        .option("bucket", BUCKET)
        .options(**options)
        .load()
        .writeStream.foreachBatch(show)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return list(query.recentProgress)


def offset(progress: Any, name: str) -> dict[str, Any]:
    """One of a progress report's three offsets, which are JSON strings."""
    text = progress["sources"][0][name]
    return dict(json.loads(text)) if text else {}


def lag(progress: Any) -> tuple[int, float | None]:
    """The query's lag after this batch in rows, and in seconds if known.

    The lag in seconds is the time between the batch's last entry and the bucket's last entry.
    """
    end, latest = offset(progress, "endOffset"), offset(progress, "latestOffset")
    rows = latest["consumer_seq"] - end["consumer_seq"]
    if not latest["time"] or not end["time"]:
        return rows, None
    return rows, (written(latest["time"]) - written(end["time"])).total_seconds()


def written(time: str) -> datetime:
    """An offset's timestamp; the server sends nanoseconds without trailing zeros."""
    seconds, _, fraction = time.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{seconds}.{fraction[:6]:0<6}+00:00")


def print_checkpoint(checkpoint: Path) -> None:
    """Print each file of the checkpoint with one line: in offset files that of the source."""
    for file in sorted(checkpoint.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            lines = file.read_text().splitlines()
            shown = lines[2] if file.parent.name == "offsets" else lines[-1]
            print(f"    {file.relative_to(checkpoint)}: {shown}")


def main(work: Path, checkpoint: Path) -> None:
    """Run the example."""
    with NatsServer(store=work / "nats") as server:
        spark = start_session("auto", work)
        try:
            print("1. The first run reads the bucket.")
            asyncio.run(write(server.url, [("pump", b"on"), ("fan", b"off")]))
            run(spark, server.url, checkpoint)

            print(
                "2. More is written while it is stopped. The second run continues after the first."
            )
            asyncio.run(write(server.url, [("pump", b"off"), ("fan", None), ("door", b"open")]))
            run(spark, server.url, checkpoint)

            print("3. The files of the checkpoint:")
            print_checkpoint(checkpoint)

            print("4. A replay from revision 2 is a new query with its own checkpoint.")
            run(spark, server.url, work / "replay", startSequence=2)

            print("5. Two rows per batch: the lag after each batch, from the query's progress.")
            for progress in run(
                spark, server.url, work / "lag", startSequence=1, maxRowsPerTrigger=2
            ):
                rows, seconds = lag(progress)
                behind = "" if seconds is None else f", {seconds:.3f} s"
                print(f"    batch {progress['batchId']}: {rows} rows{behind} behind")
        finally:
            spark.stop()


if __name__ == "__main__":
    scratch = Path(tempfile.mkdtemp(prefix="checkpoints-example-"))
    try:
        main(scratch, Path(sys.argv[1]) if sys.argv[1:] else scratch / "checkpoint")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
