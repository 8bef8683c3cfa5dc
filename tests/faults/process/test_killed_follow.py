"""Processes of queries that `follow` has started are killed while another client writes.

The driver's Python process, its JVM and planners are killed (-9) at random points, so that a query
is in any step of a micro-batch or of the asynchronous writing of its logs. Afterwards each table
has the last entry of each key that was acknowledged. A query with synchronous logs then resumes
from the checkpoint and makes no version of the table.

``FOLLOW_KILLS`` sets the number of kills, ``FOLLOW_SEED`` the points. Each kill of a driver or of a
JVM is a random point of each query.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from tests.integration.delta.table_content import marks, stored, version
from tests.support.nats import buckets
from tests.support.spark.driver_process import driver_process
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

KILLS = int(os.environ.get("FOLLOW_KILLS", "4"))
SEED = int(os.environ.get("FOLLOW_SEED", "1"))
VICTIMS = ("driver", "jvm", "planner", "jvm")
BUCKETS = ("a", "b", "c", "d", "e-1", "e-2")
QUERIES: list[tuple[dict[str, str], str]] = [
    ({"bucket": "a"}, "remove"),
    ({"bucket": "b", "includeHistory": "true"}, "mark"),
    ({"buckets": "c,d"}, "remove"),
    ({"bucketPattern": "e-.*", "failOnDataLoss": "false"}, "remove"),
]
_DEADLINE = 300.0  # seconds


class Writer(threading.Thread):
    """Writes to all buckets and keeps the last acknowledged entry of each key."""

    def __init__(self, url: str, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self._url, self._rng = url, rng
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.last: dict[tuple[str, str], tuple[int, bool]] = {}
        self.writes = 0

    def run(self) -> None:
        try:
            while not self._over.wait(0.05):
                self._write()
        except BaseException as error:  # raised by `stop`
            self._error = error

    def _write(self) -> None:
        sent = []
        for bucket in BUCKETS:
            for _ in range(self._rng.randint(0, 8)):
                # Most keys are written once: a later entry would hide a lost one.
                back = self._rng.randint(1, 50) if self._rng.random() < 0.3 else 0
                delete = back > 0 and self._rng.random() < 0.5
                sent.append((bucket, f"key.{self.writes - back}", delete))
                self.writes += 1
        messages = [
            (f"$KV.{bucket}.{key}", b"" if delete else b"x", buckets.DEL if delete else None)
            for bucket, key, delete in sent
        ]
        for (bucket, key, delete), seq in zip(
            sent, buckets.publish(self._url, messages), strict=True
        ):
            self.last[bucket, key] = (seq, delete)

    def stop(self) -> None:
        self._over.set()
        self.join(_DEADLINE)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error

    def entries(self, names: tuple[str, ...], *, deleted: bool) -> dict[tuple[str, str], int]:
        """The revision of each key of these buckets whose last entry is a marker, or a PUT."""
        return {
            key: seq
            for key, (seq, delete) in self.last.items()
            if key[0] in names and delete == deleted
        }


def names(options: dict[str, str]) -> tuple[str, ...]:
    if "bucketPattern" in options:
        return ("e-1", "e-2")
    return tuple(options.get("bucket", options.get("buckets", "")).split(","))


def content(table: Path) -> dict[tuple[str, str], int]:
    return {
        (row["bucket"], row["key"]): row["revision"]
        for row in stored(table)
        if not row.get("deleted")
    }


def victims(driver: int, what: str) -> list[int]:
    """The processes of a driver that are planners, or its JVM."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            words = (entry / "cmdline").read_bytes().split(b"\0")
            kind = (
                "jvm"
                if words[0].endswith(b"java")
                else "planner"
                if any(b"streaming_source_runner" in word for word in words)
                else ""
            )
            if kind == what and os.getpgid(pid) == driver:
                found.append(pid)
    return found


class Killed:
    """The directories of the queries, and drivers that follow and are killed."""

    def __init__(self, url: str, scratch: Path) -> None:
        self._url, self._scratch = url, scratch
        self.directories = [scratch / str(number) for number in range(len(QUERIES))]
        for directory in self.directories:
            directory.mkdir()

    @contextlib.contextmanager
    def driver(self, *, once: bool = False) -> Iterator[subprocess.Popen[bytes]]:
        queries = [
            {"options": options, "deletes": deletes, "directory": str(directory)}
            for (options, deletes), directory in zip(QUERIES, self.directories, strict=True)
        ]
        request = self._scratch / "request.json"
        request.write_text(json.dumps({"servers": self._url, "once": once, "queries": queries}))
        with driver_process("tests.faults.process.follow_driver", str(request)) as process:
            yield process

    def versions(self) -> list[int]:
        """The version of each table; -1 before the first one."""
        return [len(list(one.glob("table/_delta_log/0*.json"))) - 1 for one in self.directories]

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
    process: subprocess.Popen[bytes], table: Path, expected: dict[tuple[str, str], int]
) -> None:
    while True:
        seen = version(table)
        if content(table) == expected:
            return
        # Reading the table takes long beside its query.
        _wait(process, lambda seen=seen: version(table) > seen, f"{table} to be equal")


def logged(directory: Path) -> bool:
    """Whether the last micro-batch of the checkpoint is committed."""
    last = [
        max(int(one.name) for one in (directory / "checkpoint" / name).glob("[0-9]*"))
        for name in ("offsets", "commits")
    ]
    return last[0] == last[1]


def test_killed_queries_lose_nothing(nats_server: NatsServer, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    for name in BUCKETS:
        buckets.create_bucket(nats_server.url, name, 5)
    killed = Killed(nats_server.url, tmp_path)
    writer = Writer(nats_server.url, random.Random(SEED))
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
        expected = [writer.entries(names(options), deleted=False) for options, _ in QUERIES]
        for directory, entries in zip(killed.directories, expected, strict=True):
            table = directory / "table"
            wait_for_content(process, table, entries)
            _wait(process, functools.partial(logged, directory), "the logs to be written")
    before = killed.versions()
    with killed.driver(once=True) as process:
        assert process.wait(_DEADLINE) == 0
    assert killed.versions() == before
    found = [content(directory / "table") for directory in killed.directories]
    assert found == expected
    deleted = writer.entries(("b",), deleted=True)
    marked = marks(killed.directories[1] / "table")
    assert {key: revision for key, (revision, _) in marked.items()} == {
        key: seq for (_, key), seq in deleted.items()
    }
