"""Spark repeats what it has written in part: killed tasks, a killed driver, concurrent attempts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from nats_stream_source.options.writing import stream_write_options
from nats_stream_source.spark.runner import close_cached_runners
from nats_stream_source.spark.writing.task import TaskResult, write_task
from tests.faults.writing import sink_driver
from tests.faults.writing.publishing import AtPubAck, stored
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.nats.streams import create_stream, stream_state
from tests.support.proxy.fault_proxy import Proxy
from tests.support.spark.blocked_task import BlockedTask, session
from tests.support.spark.processes import driver_process
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

ROWS = 4000
KILLED = 2
"""Number of attempts that Spark kills. Their threads are not interrupted: while Spark hands rows to
a writer, that would crash the JVM (docs/internals/measurements.md)."""

message_ids = pytest.mark.parametrize("message_id", ["auto", "none"])


def check(server: NatsServer, stream: str, message_id: str, rows: int = ROWS) -> None:
    """Each number is stored; with ids once, and otherwise at least once."""
    copies = Counter(number for _, number in stored(server.url, stream))
    assert set(copies) == set(range(rows))
    assert max(copies.values()) == 1 if message_id == "auto" else max(copies.values()) > 1


@message_ids
def test_killed_task(
    spark: SparkSession, nats_server: NatsServer, tmp_path: Path, message_id: str
) -> None:
    """Its attempts have stored the first rows of the partition when Spark kills them."""
    create_stream(nats_server.url, "OUT")
    spark = session(spark)  # 500 rows in a record batch
    stands = BlockedTask(tmp_path / "tasks", KILLED, after=3)
    numbers = spark.range(0, ROWS, numPartitions=1).selectExpr(
        # Python flushes its rows to Spark by 64 KiB.
        "concat('OUT.', id % 7) AS subject",
        "rpad(CAST(id AS STRING), 1000, ' ') AS data",
    )
    rows = numbers.mapInArrow(stands.work, numbers.schema)
    writer = rows.write.format("nats_stream").option("servers", nats_server.url)
    writer = writer.options(stream="OUT", messageId=message_id).mode("append")

    def kill_attempts(run: Future[None]) -> None:
        def alive() -> None:
            if run.done():
                run.result()
                raise AssertionError("the job is done, and an attempt was not killed")

        before = 0
        for attempt in range(KILLED):

            def is_stored(before: int = before) -> bool:
                return bool(stream_state(nats_server.url, "OUT")["messages"] > before)

            stands.wait(attempt, alive)
            if message_id == "none" or attempt == 0:
                wait_until(is_stored, f"rows of attempt {attempt}", alive=alive, deadline=600)
            before = stream_state(nats_server.url, "OUT")["messages"]
            stands.kill(spark, attempt, False, alive)

    def save() -> None:
        # Spark finds a Python source for `write` only in a thread with an active session.
        spark.createDataFrame([], "a INT")
        writer.save()

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(save)
        try:
            kill_attempts(run)
        finally:
            stands.over()
        run.result()
    check(nats_server, "OUT", message_id)


# -- a killed driver ---------------------------------------------------------------------------


@message_ids
def test_killed_driver(
    spark: SparkSession, nats_server: NatsServer, tmp_path: Path, message_id: str
) -> None:
    """The driver is killed within a micro-batch; another driver resumes its checkpoint."""
    url = nats_server.url
    create_bucket(url, "source", 64)
    put_many(url, "source", ((f"k{i % 70}", b"%d" % i) for i in range(ROWS)))
    options = {"stream": "OUT", "messageId": message_id}
    create_stream(url, "OUT", "out.>")
    request: dict[str, Any] = {
        "servers": url,
        "bucket": "source",
        "checkpoint": str(tmp_path / "checkpoint"),
    }
    killed = threading.Event()
    processes: list[subprocess.Popen[bytes]] = []

    def kill() -> None:
        os.killpg(processes[0].pid, signal.SIGKILL)
        killed.set()

    at = 2 * sink_driver.ROWS + 200
    with Proxy(nats_server.port, AtPubAck(at, kill)) as proxy:
        through = {**request, "options": {**options, "servers": proxy.url}}
        module = "tests.faults.writing.sink_driver"
        with driver_process(module, json.dumps(through)) as process:
            processes.append(process)
            wait_until(killed.is_set, "the driver is killed", alive=alive(process), deadline=600)
    assert at <= stream_state(url, "OUT")["messages"] <= 3 * sink_driver.ROWS
    commits = tmp_path / "checkpoint" / "commits"
    assert sorted(path.name for path in commits.glob("?")) == ["0", "1"]
    query = sink_driver.start(spark, {**request, "options": {**options, "servers": url}})
    assert query.awaitTermination(600)
    assert query.exception() is None
    check(nats_server, "OUT", message_id)


def alive(process: subprocess.Popen[bytes]) -> Callable[[], None]:
    def check_alive() -> None:
        assert process.poll() in (None, -signal.SIGKILL), "the driver ended by itself"

    return check_alive


# -- speculative execution ---------------------------------------------------------------------


@message_ids
def test_concurrent_attempts(nats_server: NatsServer, message_id: str) -> None:
    """Two attempts of one task send their rows alternately, as a speculative one may."""
    create_stream(nats_server.url, "OUT")
    given = {"servers": nats_server.url, "stream": "OUT", "messageId": message_id}
    barrier = threading.Barrier(2, timeout=60)

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, ROWS, 500):
            barrier.wait()
            numbers = range(start, start + 500)
            yield pa.RecordBatch.from_pydict(
                {
                    "subject": [f"OUT.{number % 7}" for number in numbers],
                    "data": pa.array([b"%d" % number for number in numbers], pa.binary()),
                }
            )

    def attempt(request_timeout: int) -> TaskResult:
        # Tasks of one process share a connection; another setting has a connection of its own.
        options = stream_write_options({**given, "requestTimeout": str(request_timeout)})
        return write_task(options, batches(), job="job", partition=0)

    with ThreadPoolExecutor(2) as pool:
        results = [one.result() for one in [pool.submit(attempt, n) for n in (5, 6)]]
    close_cached_runners()
    assert [result.stored for result in results] == [ROWS, ROWS]
    repeated = ROWS if message_id == "auto" else 0
    assert sum(result.duplicates for result in results) == repeated
    check(nats_server, "OUT", message_id)
