"""Processes of queries that `follow` has started are killed while another client writes.

The driver's Python process, its JVM and planners are killed (-9) at random points, so that a query
is in any step of a micro-batch or of the asynchronous writing of its logs. Afterwards each table
has the last entry of each key that was acknowledged, or of a history each version. The checkpoints
then lose their last micro-batches, as after another crash: queries with synchronous logs repeat
them and make no version of a table.

``FOLLOW_KILLS`` sets the number of kills, ``FOLLOW_SEED`` the points. Each kill of a driver or of a
JVM is a random point of each query.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.process.follow_driver import following
from tests.integration.delta.table_content import version
from tests.support.followed import Query, Row, Writer
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
