"""A Spark driver that is killed, or whose tasks fail, at a chosen point of a micro-batch.

Run as a program with one argument, a JSON file::

    {"servers": "nats://…", "master": "local[8]", "conf": {…},
     "to_the_end": false, "hides_formats": false,
     "queries": [{"format": …, "options": {…}, "directory": …, "streaming": true,
                  "point": "reading", "batch": 0}, …]}

:func:`stopping_driver` starts it, :func:`stored_rows` reads the sink.

Each query has its checkpoint in ``<directory>/checkpoint``. Its sink is idempotent: each task
writes its rows to a file of its own, and the driver links those of the tasks that Spark counts to
``<directory>/rows/<micro-batch>-<split>.json``. For a task that outlives its driver, or that Spark
kills, the rows may end early without an error: it writes some of them. At its point, in
the micro-batch ``batch``, a query leaves ``<directory>/at`` and then what follows. A batch read,
which is not ``streaming``, is its micro-batch 0; it is read while the queries before it run.
With ``hides_formats`` Spark does not find the formats by their modules: the program writes what
Spark reports then to ``lookup`` beside the JSON file, and calls ``register``.

=============  ==============================================================================
``planned``    waits for ever before a row is requested
``reading``    waits for ever in the middle of the rows of a split
``written``    waits for ever when all rows are written
``task fails`` raises in a task, in the middle of its rows, once
``task dies``  kills the task's Python worker there (-9), once
``task slow``  lets one attempt of the first task wait there, until another one is through
=============  ==============================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark import TaskContext
from pyspark.sql import DataFrame, Row

from nats_stream_source import register
from tests.support.paths import ROOT
from tests.support.spark.processes import driver_process
from tests.support.spark.session import LOCAL, configured
from tests.support.spark.streaming_query import begin

# Workers import this at their start: the module that looks for data sources finds none.
HIDE_FORMATS = """
import pkgutil
_all = pkgutil.iter_modules
pkgutil.iter_modules = lambda *a, **k: (
    m for m in _all(*a, **k) if not m.name.startswith("pyspark_nats_")
)
"""
MIDDLE = 100  # rows
IN_A_TASK = ("reading", "task fails", "task dies", "task slow")


def sink(directory: Path, point: str, at: int) -> Callable[[DataFrame, int], None]:
    """What ``foreachBatch`` gets."""

    def write(batch: DataFrame, batch_id: int) -> None:
        here = point if batch_id == at else ""
        if here == "planned":
            arrive(directory)
        store(batch, task(str(directory), batch_id, here))
        if here == "written":
            arrive(directory)

    return write


def arrive(directory: Path) -> None:
    """Leave the mark, and wait to be killed."""
    (directory / "at").touch()
    threading.Event().wait()


def store(batch: DataFrame, write: Callable[[Iterator[Row]], Iterator[str]]) -> None:
    """Run the tasks, then link what they wrote; a repeated micro-batch has its rows already."""
    for partial in batch.rdd.mapPartitions(write).collect():
        with contextlib.suppress(FileExistsError):
            os.link(partial, Path(partial).with_suffix(""))


def task(directory: str, batch_id: int, point: str) -> Callable[[Iterator[Row]], Iterator[str]]:
    """Writes the rows of one split, and yields the file's name; pickled to the workers."""

    def write(rows: Iterator[Row]) -> Iterator[str]:
        context = TaskContext.get()
        assert context is not None
        split = context.partitionId()
        kept: list[list[Any]] = []
        for row in rows:
            kept.append(
                [row.revision, bytes(row.value[:12]).decode()]
                if "revision" in row
                else [row.sequence, bytes(row.data[:12]).decode()]
            )
            if len(kept) == MIDDLE and point in IN_A_TASK:
                trouble(Path(directory), point, split)
        partial = Path(directory, "rows", f"{batch_id}-{split}.json.{uuid.uuid4().hex}")
        partial.write_text(json.dumps(kept))
        yield str(partial)

    return write


def trouble(directory: Path, point: str, split: int) -> None:
    """What befalls a task in the middle of its rows: the first one that gets there."""
    if point == "reading":
        arrive(directory)
    if point == "task slow" and split:
        return
    try:
        # Not by the number of the attempt: Spark may have lost one before it had any rows.
        (directory / "at").touch(exist_ok=False)
    except FileExistsError:
        return
    if point == "task fails":
        raise RuntimeError("the task fails, as it was told to")
    if point == "task dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if point == "task slow":
        # The other attempt has written its rows by then; this one is killed, or writes the same.
        for _ in range(2000):
            if any((directory / "rows").glob("0-0.json.*")):
                (directory / "overtaken").touch()
                break
            threading.Event().wait(0.1)


@contextlib.contextmanager
def stopping_driver(request: Path, **asked: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program, which logs beside its request; at the end it is killed."""
    request.write_text(json.dumps({"master": "local[4]", **asked}))
    module = "tests.faults.process.crash_point_driver"
    with (
        request.with_suffix(".log").open("ab") as log,
        driver_process(module, str(request), log) as process,
    ):
        yield process


def stored_rows(directory: Path, batch: str = "*") -> list[list[Any]]:
    """What the sink has, of one micro-batch or in the order of micro-batches and splits."""

    def order(path: Path) -> tuple[int, ...]:
        return tuple(map(int, path.stem.split("-")))

    found = sorted((directory / "rows").glob(f"{batch}-*.json"), key=order)
    return [row for path in found for row in json.loads(path.read_text())]


def main(request: dict[str, Any], scratch: Path) -> None:
    # The executors of another process find the package as this one does.
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if request.get("hides_formats"):
        (scratch / "sitecustomize.py").write_text(HIDE_FORMATS)
        paths.insert(0, str(scratch))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    settings = {
        **LOCAL,
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        **request.get("conf", {}),
    }
    spark = configured(settings, request["master"]).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    if request.get("hides_formats"):
        try:
            spark.readStream.format("nats_kv").load()
            reported = "found"
        except Py4JJavaError as error:  # PySpark has no class of its own for this one
            reported = str(error.java_exception.getMessage())
        (scratch / "lookup").write_text(reported)
        register(spark, check=False)  # these processes start often
    queries = []
    for query in request["queries"]:
        directory = Path(query["directory"])
        (directory / "rows").mkdir(parents=True, exist_ok=True)
        reads = spark.readStream if query["streaming"] else spark.read
        loaded = (
            reads.format(query["format"])
            .options(servers=request["servers"], **query["options"])
            .load()
        )
        if not query["streaming"]:
            store(loaded, task(str(directory), 0, query["point"]))
            continue
        writes = loaded.writeStream.foreachBatch(
            sink(directory, query["point"], query["batch"])
        ).option("checkpointLocation", str(directory / "checkpoint"))
        if request.get("to_the_end"):
            writes = writes.trigger(availableNow=True)
        # One after the other: each start is a Python process.
        queries.append(begin(writes.start))
    for running in queries:
        running.awaitTermination()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    main(json.loads(path.read_text()), path.parent)
