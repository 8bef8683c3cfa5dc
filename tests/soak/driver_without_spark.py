"""The driver without Spark: the same queries, called as Spark calls them, in Spark's order.

Run as ``python -m tests.soak.driver_without_spark <file>``, with the file of ``tests.soak.driver``.
Each query is a process that keeps a checkpoint as Spark does: the end of a micro-batch is logged
before it is read, and it is committed after the sink has it. Starting takes two seconds instead of
twenty, so a short run has many more restarts, and a machine that is too busy for Spark can run it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from nats_stream_source.options import Mode, kv_options, stream_options
from tests.soak.driver import OPTIONS, QUERIES, linger, stop_event
from tests.support.delta import rows_of
from tests.support.oracle.query_failures import is_data_loss
from tests.support.query_driver.driver import QueryDriver

_EVERY = 0.3  # seconds between two micro-batches
_AGAIN = 0.5  # seconds after a failure
_COLUMNS = pa.schema(
    [
        ("revision", pa.int64()),
        ("key", pa.string()),
        ("operation", pa.string()),
        ("value", pa.binary()),
    ]
)


class LocalQuery:
    def __init__(self, name: str, request: dict[str, Any]) -> None:
        self._name = name
        self._directory = Path(request["directory"])
        self._finish = request["finish"]
        self._checkpoint = self._directory / "checkpoints" / name
        self._log = (self._directory / "events.jsonl").open("a", buffering=1)
        options = {key: str(value) for key, value in OPTIONS[name].items()}
        options["servers"] = request["servers"]
        parse = stream_options if name == "stream" else kv_options
        self._options = parse(options, Mode.STREAMING)

    def run(self, stopped: threading.Event) -> None:
        """Until ``stopped``, or until all is read, or until data loss."""
        while not stopped.is_set():
            committed = self._last("commits")
            offsets = [self._logged(committed)] if committed >= 0 else []
            query = QueryDriver(self._options, offsets)
            try:
                self._read(query, committed + 1, stopped)
                return
            except Exception:  # as a supervisor: a failed query is started again
                text = traceback.format_exc()
                self._say("failed", text=text)
                if is_data_loss(text):
                    return
            finally:
                query.close()
            stopped.wait(_AGAIN)

    def _read(self, query: QueryDriver, number: int, stopped: threading.Event) -> None:
        if self._finish:
            query.prepare_available_now()
        if self._last("offsets") == number:  # it was not committed
            query.plan_logged(self._logged(number))
        while not stopped.is_set():
            if query.logged is not None or query.plan():
                self._put("offsets", number, query.logged)
                self._batch(number, query)
                number += 1
            elif self._finish:
                self._say("done")
                return
            else:
                stopped.wait(_EVERY)

    def _batch(self, number: int, query: QueryDriver) -> None:
        batches = query.read().batches
        if self._name == "current":
            self._merge(batches)
        else:
            place = self._directory / self._name / f"{number:08d}" / f"{time.time_ns()}"
            place.mkdir(parents=True)
            if batches:
                pq.write_table(pa.Table.from_batches(batches), place / "part-0.parquet")
            (place / "_SUCCESS").touch()
        linger(number)
        self._put("commits", number, query.offset)
        rows = sum(batch.num_rows for batch in batches)
        self._say("batch", end=position(query.offset), rows=rows)

    def _merge(self, batches: Sequence[pa.RecordBatch]) -> None:
        """The rows by key into the table, which is small enough to be rewritten."""
        place = str(self._directory / "table")
        rows: dict[str, dict[str, Any]] = {}
        if DeltaTable.is_deltatable(place):
            # From the table, not from memory: what counts is what a restart would find.
            rows = {row["key"]: row for row in rows_of(DeltaTable(place))}
        for batch in batches:
            for row in batch.select(_COLUMNS.names).to_pylist():
                if row["key"] not in rows or row["revision"] > rows[row["key"]]["revision"]:
                    rows[row["key"]] = row
        # Markers stay, as with deletes="mark": without them an older PUT could come back.
        table = pa.Table.from_pylist(list(rows.values()), schema=_COLUMNS)
        write_deltalake(place, table, mode="overwrite")

    def _last(self, kind: str) -> int:
        numbers = (int(one.name) for one in (self._checkpoint / kind).glob("[0-9]*"))
        return max(numbers, default=-1)

    def _logged(self, number: int) -> Any:
        return json.loads((self._checkpoint / "offsets" / str(number)).read_text())

    def _put(self, kind: str, number: int, value: Any) -> None:
        place = self._checkpoint / kind
        place.mkdir(parents=True, exist_ok=True)
        partial = place / "partial"
        partial.write_text(json.dumps(value))
        os.replace(partial, place / str(number))

    def _say(self, event: str, **fields: Any) -> None:
        line = {"at": time.time(), "event": event, "query": self._name, **fields}
        self._log.write(json.dumps(line) + "\n")


def position(offset: dict[str, Any]) -> int:
    """The sequence of an offset; of several streams the sum, which only grows."""
    if "streams" in offset:
        return sum(at["stream_seq"] for at in offset["streams"].values())
    return int(offset["stream_seq"])


def main(path: str, name: str | None = None) -> None:
    request = json.loads(Path(path).read_text())
    stopped = stop_event(finish=request["finish"])
    if name is not None:
        LocalQuery(name, request).run(stopped)
        return
    with (Path(request["directory"]) / "events.jsonl").open("a") as log:
        line = {"at": time.time(), "event": "started", "serial": request["serial"]}
        log.write(json.dumps(line) + "\n")
    queries = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.soak.driver_without_spark", path, one],
            stdin=subprocess.PIPE,
        )
        for one in QUERIES
        if one not in request["skip"]
    ]
    while not stopped.wait(0.1):
        if request["finish"] and all(query.poll() is not None for query in queries):
            break
    for query in queries:
        if stopped.is_set() and query.stdin is not None:
            with contextlib.suppress(OSError):
                query.stdin.close()
        query.wait()
    sys.exit(max((query.returncode != 0 for query in queries), default=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
