"""Processes of queries that `follow` has started, and of merges, are killed at random points.

The driver's Python process, its JVM and planners are killed (-9) while another client writes, so
that a query is in any step of a micro-batch or of the asynchronous writing of its logs. Afterwards
each table has the last entry of each key that was acknowledged, or of a history each version. The
checkpoints then lose their last micro-batches, as after another crash: queries with synchronous
logs repeat them and make no version of a table.

A merge writes data files first and commits then, with one file in the log. Its process is stopped
(SIGSTOP) at a random point and killed: before its data files, between data files and commit, and
after the commit. Each of them has to occur.

``FOLLOW_KILLS`` sets the number of kills of queries, ``FOLLOW_SEED`` the points. Each kill of a
driver or of a JVM is a random point of each query.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.process.follow_driver import following
from tests.integration.delta.merge_model import stored, version
from tests.support.follower import Query, Row, Writer
from tests.support.nats import buckets
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults


KILLS = int(os.environ.get("FOLLOW_KILLS", "4"))
SEED = int(os.environ.get("FOLLOW_SEED", "1"))
VICTIMS = ("driver", "jvm", "planner", "jvm")
BUCKETS = ("a", "b", "c", "d", "e-1", "e-2", "f", "g")
_DEADLINE = 300.0  # seconds

QUERIES = [
    Query({"bucket": "a"}),
    Query({"bucket": "b", "includeHistory": "true"}, {"deletes": "mark"}),
    Query({"buckets": "c,d"}),
    Query({"bucketPattern": "e-.*", "failOnDataLoss": "false"}),
    # By a sequence that is not the default, with a table of the deletes' sequences.
    Query({"bucket": "f"}, {"stored_as_scd_type": 1, "sequence_by": "revision"}),
    Query({"bucket": "g", "includeHistory": "true"}, {"stored_as_scd_type": 2}),
]


def victims(driver: int, what: str) -> list[int]:
    """The processes of a driver that are planners, or its JVM."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            planner = any("streaming_source_runner" in word for word in process.cmdline())
            is_one = process.name() == "java" if what == "jvm" else planner
            if is_one and os.getpgid(process.pid) == driver:
                found.append(process.pid)
    return found


class Killed:
    """The directories of the queries, and drivers that follow and are killed."""

    def __init__(self, url: str, scratch: Path) -> None:
        self._url, self._scratch = url, scratch
        self.directories = [scratch / str(number) for number in range(len(QUERIES))]
        for directory in self.directories:
            directory.mkdir()

    def driver(self, *, once: bool = False) -> AbstractContextManager[subprocess.Popen[bytes]]:
        queries = [
            (query, directory / "table", directory)
            for query, directory in zip(QUERIES, self.directories, strict=True)
        ]
        return following(self._scratch, self._url, queries, once=once)

    def versions(self) -> list[int]:
        """The version of each table; -1 before the first one."""
        return [len(list(one.glob("table/_delta_log/0*.json"))) - 1 for one in self.directories]

    def all_versions(self) -> list[int]:
        """The version of each table and of each state table."""
        logs = sorted(self._scratch.glob("*/table*/_delta_log"))
        return [len(list(log.glob("0*.json"))) - 1 for log in logs]

    def wait_for_progress(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until each query has changed its table."""
        before = self.versions()
        _wait(
            process,
            lambda: all(now > was for now, was in zip(self.versions(), before, strict=True)),
            "each query to change its table",
        )


def _wait(process: subprocess.Popen[bytes], condition: Callable[[], Any], what: str) -> None:
    def alive() -> None:
        assert process.poll() is None, "the driver ended by itself"

    wait_until(condition, what, _DEADLINE, alive=alive)


def wait_for_content(
    process: subprocess.Popen[bytes], query: Query, table: Path, expected: list[Row]
) -> None:
    while True:
        seen = version(table)
        if query.stored(table) == expected:
            return
        # Reading the table takes long beside its query.
        _wait(process, lambda seen=seen: version(table) > seen, f"{table} to be equal")


def last(directory: Path, name: str) -> int:
    """The last micro-batch in a log of the checkpoint."""
    return max(int(one.name) for one in (directory / "checkpoint" / name).glob("[0-9]*"))


def logged(directory: Path) -> bool:
    """Whether the last micro-batch of the checkpoint is committed."""
    return last(directory, "offsets") == last(directory, "commits")


def remove_last_batches(directory: Path, query: Query) -> int:
    """Remove what the checkpoint has of its last micro-batches; the first one that is repeated.

    A removed row leaves no revision: of several micro-batches, an earlier PUT would insert the key
    until the micro-batch with its marker is repeated.
    """
    first = last(directory, "commits") - (2 if query.arguments else 0)
    for name, kept in (("offsets", first), ("commits", first - 1)):
        for number in range(kept + 1, last(directory, name) + 1):
            log = directory / "checkpoint" / name
            (log / str(number)).unlink()
            (log / f".{number}.crc").unlink()
    return first


def test_killed_queries_lose_nothing(nats_server: NatsServer, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    for name in BUCKETS:
        buckets.create_bucket(nats_server.url, name, 64 if name == "g" else 5)
    killed = Killed(nats_server.url, tmp_path)
    writer = Writer(nats_server.url, BUCKETS, random.Random(SEED))
    writer.start()
    kills = points = 0
    while kills < KILLS:
        with killed.driver() as process:
            killed.wait_for_progress(process)
            while kills < KILLS:
                what = VICTIMS[kills % len(VICTIMS)]
                time.sleep(rng.uniform(0, 1))
                pids = [process.pid] if what == "driver" else victims(process.pid, what)
                assert pids, what
                os.kill(rng.choice(pids), signal.SIGKILL)
                kills += 1
                points += 1 if what == "planner" else len(QUERIES)
                if what != "planner":
                    break
                killed.wait_for_progress(process)
    print(f"{kills} kills, {points} points, {writer.writes} writes, seed {SEED}")
    with killed.driver() as process:
        killed.wait_for_progress(process)
        writer.stop()
        expected = [query.expected(writer.written) for query in QUERIES]
        for directory, query, rows in zip(killed.directories, QUERIES, expected, strict=True):
            wait_for_content(process, query, directory / "table", rows)
            _wait(process, functools.partial(logged, directory), "the logs to be written")
    before = killed.all_versions()
    repeated = list(map(remove_last_batches, killed.directories, QUERIES))
    with killed.driver(once=True) as process:
        assert process.wait(_DEADLINE) == 0
    for directory, first in zip(killed.directories, repeated, strict=True):
        assert last(directory, "commits") >= first
    assert killed.all_versions() == before
    tables = [directory / "table" for directory in killed.directories]
    found = [query.stored(table) for query, table in zip(QUERIES, tables, strict=True)]
    assert found == expected


# -- two drivers into one table --------------------------------------------------------------------


BOTH = ("a", "b")
BATCHES = 20


@pytest.mark.parametrize("arguments", [{}, {"stored_as_scd_type": 2}], ids=["latest", "history"])
def test_two_drivers_follow_into_one_table(
    nats_server: NatsServer, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    url, table = nats_server.url, tmp_path / "table"
    queries = []
    for name in BOTH:
        buckets.create_bucket(url, name, 64)
        directory = tmp_path / name
        directory.mkdir()
        query = Query({"bucket": name, "includeHistory": "true"}, arguments)
        queries.append((query, table, directory))
    writer = Writer(url, BOTH, random.Random(1))
    writer.start()

    def batches() -> list[int]:
        return [len(list(one.glob("checkpoint/commits/[0-9]*"))) for _, _, one in queries]

    def conflicted() -> bool:
        logs = [one.read_text() for one in tmp_path.glob("*/log")]
        return any("another writer changed the table" in log for log in logs)

    def stored() -> bool:
        return queries[0][0].stored(table) == expected

    with contextlib.ExitStack() as stack:
        processes = []
        for one in queries:
            processes.append(stack.enter_context(following(one[2], url, [one])))

        def alive() -> None:
            assert [process.poll() for process in processes] == [None, None]
            assert not list(tmp_path.glob("*/errors")), "a query ended"

        wait_until(
            lambda: min(batches()) >= BATCHES and conflicted(),
            "micro-batches and a conflict of their commits",
            _DEADLINE,
            alive=alive,
        )
        writer.stop()
        expected = sorted(row for query, _, _ in queries for row in query.expected(writer.written))
        wait_until(stored, "the table to be equal", _DEADLINE, alive=alive)
        alive()


KEYS = 20_000
ATTEMPTS = 120
SECONDS = 120.0  # for all attempts
STATES = {"before", "between", "after"}

PROGRAM = """
import sys
import pyarrow as pa
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.driver.table import DriverTable
from nats_stream_source.delta.rules.events import EventBatch, EventShape
from nats_stream_source.delta.rules.layout import Layout
path, keys, revision = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
entries = pa.table({
    "key": [f"key.{i}" for i in range(keys)],
    "value": [b"%064d" % (i * revision) for i in range(keys)],
    "revision": pa.array([revision] * keys, pa.int64()),
    "operation": ["PUT"] * keys,
    "stream_created": pa.array([0] * keys, pa.timestamp("us", "UTC")),
})
table = DriverTable(TableStorage(path, path), False)
shape = EventShape(entries.schema, Layout.of_entries(entries.schema.names, "remove"), computed=True)
table.merge(EventBatch.in_memory(shape, entries[:0]), None)
print("ready", flush=True)
sys.stdin.readline()
table.merge(EventBatch.in_memory(shape, entries), None)
print("done", flush=True)
"""


def files(table: Path) -> tuple[set[str], int]:
    names = set(os.listdir(table))
    log = table / "_delta_log"
    return names, sum(name.endswith(".json") and name[0] == "0" for name in os.listdir(log))


def merged(table: Path, revision: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(table), str(KEYS), str(revision)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_killed_at_every_step(tmp_path: Path) -> None:
    table = tmp_path / "table"
    seen: Counter[str] = Counter()
    rng = random.Random(1)
    duration, revision = 0.0, 1
    began = time.monotonic()
    for _ in range(ATTEMPTS):
        if seen.keys() >= STATES and revision > 3:
            break
        assert time.monotonic() - began < SECONDS, seen
        process = merged(table, revision)
        assert process.stdin is not None
        assert process.stdout is not None
        before = files(table)
        process.stdin.write("go\n")
        process.stdin.flush()
        started = time.monotonic()
        if duration:
            # At random, or as soon as a data file is there: the commit follows at once.
            wait = rng.uniform(0, 1.2) * duration
            at_first_file = rng.random() < 0.5
            while time.monotonic() - started < wait or at_first_file:
                if process.poll() is not None or (at_first_file and files(table)[0] != before[0]):
                    break
        else:
            assert process.stdout.readline() == "done\n"
            duration = time.monotonic() - started
        if process.poll() is None:
            process.send_signal(signal.SIGSTOP)
        now = files(table)
        state = "after" if now[1] > before[1] else "between" if now[0] != before[0] else "before"
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        seen[state] += 1
        found = Counter((row["revision"], row["value"]) for row in stored(table))
        revisions = {one for one, _ in found}
        assert len(revisions) <= 1, (state, revisions)
        if state == "after":
            assert revisions == {revision}
            assert sum(found.values()) == KEYS
            revision += 1
        else:
            assert revisions <= {revision - 1}
            assert sum(found.values()) in (0, KEYS)
    assert seen.keys() >= STATES, seen
    # The next merge goes on from whatever was left.
    with merged(table, revision) as process:
        process.communicate("go\n")
    assert process.returncode == 0
    assert {row["revision"] for row in stored(table)} == {revision}
    last = sorted((table / "_delta_log").glob("0*.json"))[-1]
    assert json.loads(last.read_text().splitlines()[0])["commitInfo"]["operation"] == "MERGE"
