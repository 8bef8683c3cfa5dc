"""The Spark driver of a soak: five queries with checkpoints and sinks, killed by the faults.

Run as ``python -m tests.soak.driver <file>`` with a JSON file::

    {"servers": "nats://…", "directory": "…", "finish": false, "skip": ["full"],
     "serial": 1}

A failed query is logged and restarted, as by a supervisor, unless it stopped for data loss. The
driver ends when its standard input is closed (a graceful stop); with ``finish``, when all queries
have read all messages. ``events.jsonl`` in the directory has a line for each micro-batch, failure,
start and end.

``full``, ``stream`` and ``sites`` write each micro-batch into ``<query>/<batch id>/<attempt>``,
whose ``_SUCCESS`` file marks it as complete: the last complete attempt counts, as for any
idempotent sink, and earlier ones show whether a range that is read again has the same rows.
``copy`` writes into a stream, with message ids, so that a micro-batch that is repeated is stored
once.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from nats_stream_source import register
from nats_stream_source.delta import merge_changes, reconcile
from nats_stream_source.spark.progress import BatchProgress, watch_progress
from tests.soak import sites
from tests.soak.servers import COPY, COPY_PREFIX, PREFIXES
from tests.support.oracle.query_failures import is_data_loss
from tests.support.spark.session import delta_session

QUERIES = ("full", "current", "stream", "sites")
"""The queries that both drivers run."""

_COPY = "copy"

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"bucket": "full", "includeHistory": True, "maxRowsPerTrigger": 4000},
    "current": {"bucket": "current"},
    "stream": {"stream": "EVENTS", "minPartitions": 3},
    "sites": sites.OPTIONS,
    _COPY: {"stream": "EVENTS"},
}
_TRIGGER_INTERVALS = {
    "full": "700 milliseconds",
    "current": "2 seconds",
    "stream": "700 milliseconds",
    "sites": "1 second",
    _COPY: "1 second",
}
_RETRY_INTERVAL = 2.0  # seconds after a failure


def session(directory: Path) -> SparkSession:
    """A small session on two cores; a task has three attempts."""
    settings = {
        "spark.app.name": "soak",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.streaming.minBatchesToRetain": "20",
    }
    return delta_session(settings, "local[2,3]")


def linger(batch_id: int) -> None:
    """Delay some commits after the sink, so that the driver may be killed between the two."""
    if batch_id % 3 == 0:
        time.sleep(1)


def attempts_sink(directory: Path) -> Callable[[DataFrame, int], None]:
    """A sink for ``foreachBatch`` with a separate folder for each attempt of a micro-batch."""

    def write(batch: DataFrame, batch_id: int) -> None:
        batch.write.parquet(str(directory / f"{batch_id:08d}" / f"{time.time_ns()}"))
        linger(batch_id)

    return write


class Driver:
    """The queries of one session."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._directory = Path(request["directory"])
        self._servers = request["servers"]
        self._serial = request["serial"]
        self._finish = request["finish"]
        self._running: dict[str, StreamingQuery] = {}
        self._read: set[str] = set()  # queries that have finished a micro-batch
        self._lost = set(request["skip"])
        queries = (*QUERIES, _COPY)
        self._due = {name: 0.0 for name in queries if name not in request["skip"]}
        self._log = (self._directory / "events.jsonl").open("a", buffering=1)
        self._spark = session(self._directory)
        register(self._spark)
        watch_progress(self._spark, self._progress)

    def run(self, stopped: threading.Event) -> None:
        """Run the queries until ``stopped`` or, with ``finish``, until they have read all."""
        self._record("started", serial=self._serial)
        while not stopped.is_set() and (self._running or self._due or not self._finish):
            now = time.monotonic()
            for name, due in list(self._due.items()):
                # One at a time: each start runs half a dozen Python processes.
                if due <= now and self._running.keys() <= self._read:
                    del self._due[name]
                    self._start(name)
            for name, query in list(self._running.items()):
                if not query.isActive:
                    del self._running[name]
                    self._ended(name, query)
            stopped.wait(0.1)
        for query in self._running.values():
            query.stop()
        if self._finish and "current" not in self._lost:
            self._reconcile()
        self._record("stopped")
        self._spark.stop()

    def _start(self, name: str) -> None:
        reader = self._spark.readStream.format(
            "nats_stream" if "stream" in OPTIONS[name] else "nats_kv"
        )
        rows = reader.options(servers=self._servers, **OPTIONS[name]).load()
        if name == _COPY:
            writer = self._copies(rows)
        elif name == "current":
            writer = rows.writeStream.foreachBatch(merge_changes(str(self._directory / "table")))
        else:
            writer = rows.writeStream.foreachBatch(attempts_sink(self._directory / name))
        writer = writer.queryName(name).option(
            "checkpointLocation", str(self._directory / "checkpoints" / name)
        )
        trigger = (
            writer.trigger(availableNow=True)
            if self._finish
            else writer.trigger(processingTime=_TRIGGER_INTERVALS[name])
        )
        self._running[name] = trigger.start()

    def _copies(self, rows: DataFrame) -> DataStreamWriter:
        key = f"substring(subject, {len(PREFIXES['stream']) + 1})"
        copied = rows.selectExpr(f"concat('{COPY_PREFIX}', {key}) AS subject", "data")
        writer = copied.writeStream.format("nats_stream")
        return writer.options(servers=self._servers, stream=COPY, messageId="auto")

    def _ended(self, name: str, query: StreamingQuery) -> None:
        error = query.exception()
        if error is None:
            self._record("done", query=name)
            return
        self._record("failed", query=name, text=str(error))
        if is_data_loss(str(error)):
            self._lost.add(name)
        else:
            self._due[name] = time.monotonic() + _RETRY_INTERVAL

    def _reconcile(self) -> None:
        # Changes rows only if the marker of an expired entry was not read.
        table = str(self._directory / "table")
        before = DeltaTable(table).version()
        self._record("reconciling")
        result = reconcile(self._spark, table, bucket="current", servers=self._servers)
        self._record("reconciled", before=before, result=repr(result))

    def _progress(self, record: BatchProgress) -> None:
        self._read.add(record.query)
        self._record("batch", query=record.query, end=record.end, rows=record.rows)

    def _record(self, event: str, **fields: Any) -> None:
        self._log.write(json.dumps({"at": time.time(), "event": event, **fields}) + "\n")


def stop_event(*, finish: bool) -> threading.Event:
    """An event that the end of the standard input sets, unless the queries are to ``finish``."""
    stopped = threading.Event()

    def wait_for_stop() -> None:
        os.read(0, 1)  # not through sys.stdin, whose lock would be held at Python's exit
        stopped.set()

    if not finish:
        threading.Thread(target=wait_for_stop, daemon=True).start()
    return stopped


def main(request: dict[str, Any]) -> None:
    Driver(request).run(stop_event(finish=request["finish"]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
