"""Drivers and tasks fail at each point of a micro-batch; each row reaches the sink once.

Drivers of their own (``crash_point_driver.py``) are killed (-9) after a micro-batch was planned,
while it is read, and after the sink wrote it, each before it was committed, in the first one and
the next one. Tasks fail, are killed and are overtaken. A new driver resumes the same checkpoint and
sink. The oracle: what was written, each value once and in the order of its sequence; of current
values, those that were a key's last when the query began, and all later ones.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.process.crash_point_driver import stopping_driver, stored_rows
from tests.support.leak_check import consumers
from tests.support.nats.buckets import create_bucket, publish
from tests.support.nats.streams import create_stream
from tests.support.spark.daemons import standalone
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

COUNTS = {"large": 30_000, "small": 3000}
"""Messages of a KB, in a bucket and a stream of each name, before and again after the first
micro-batch. Large is more than fits between a reader that waits and the server, so that a split can
be caught in the middle."""


@dataclass(frozen=True)
class Read:
    """What a query or a batch reads of a place."""

    format: str
    current: bool = False
    streaming: bool = True

    def __str__(self) -> str:
        current = " (current values)" if self.current else ""
        return f"{self.format}{current}{'' if self.streaming else ', a batch'}"

    def options(self, place: str) -> dict[str, str]:
        if self.format == "nats_stream":
            return {"stream": place.upper()}
        return {"bucket": place, **({} if self.current else {"includeHistory": "true"})}

    def rows(self, first: int, later: int = 0) -> list[list[Any]]:
        """What it has when ``first`` messages were written before it began, ``later`` since."""
        numbers = [*range(self.current, first, 1 + self.current), *range(first, first + later)]
        return [[i + 1, f"{i:012d}"] for i in numbers]


KV, CURRENT, STREAM = Read("nats_kv"), Read("nats_kv", current=True), Read("nats_stream")
BATCH_OF_CURRENT = Read("nats_kv", current=True, streaming=False)
BATCH_OF_A_STREAM = Read("nats_stream", streaming=False)


@dataclass(frozen=True)
class Point:
    """A query, and where it is stopped in its first two micro-batches."""

    read: Read
    point: str

    @property
    def batches(self) -> tuple[int, ...]:
        """After the first one, current values are read as all others are."""
        return (0,) if self.read.current else (0, 1)

    @property
    def place(self) -> str:
        return "large" if self.point == "reading" else "small"

    def splits(self, batch: int) -> int:
        """Current values are one split; one that is caught in the middle is a large one."""
        return 1 if self.point == "reading" or (self.read.current and batch == 0) else 3


KILLED = {
    f"{read}, {point}": Point(read, point)
    for read in (KV, CURRENT, STREAM)
    for point in ("planned", "reading", "written")
}
DEADLINE = 1200.0
"""Seconds for a driver to get somewhere; nine queries on a busy machine take their time."""


def write(url: str, place: str, first: int, count: int) -> None:
    """Numbered values, into the bucket and into the stream; each PubAck awaited.

    Two of each key, one after the other: a later value does not take the place of an earlier one
    that a query began with, so current values that are read again are the same.
    """
    numbers = range(first, first + count)
    for prefix in (f"$KV.{place}.k", f"{place}."):
        publish(url, ((f"{prefix}{i // 2}", b"%012d" % i + bytes(1000), None) for i in numbers))


def query(read: Read, place: str, directory: Path, point: str, batch: int = 0) -> dict[str, Any]:
    """The argument of ``crash_point_driver.py``."""
    return {
        "format": read.format,
        "options": {
            "requestTimeout": "30",
            "connectTimeout": "30",
            "minPartitions": "3" if place == "small" else "1",
            **read.options(place),
        },
        "directory": str(directory),
        "streaming": read.streaming,
        "point": point,
        "batch": batch,
    }


def create(url: str, place: str) -> None:
    create_bucket(url, place, history=64, max_msgs_per_subject=-1)
    create_stream(url, place.upper(), f"{place}.>", allow_direct=True)
    write(url, place, 0, COUNTS[place])


@pytest.fixture(scope="module")
def killed(shared_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, url = tmp_path_factory.mktemp("points"), shared_server.url
    places = {name: root / str(i) for i, name in enumerate(KILLED)}
    for place in COUNTS:
        create(url, place)
    for batch in (0, 1):
        some = {name: place for name, place in places.items() if batch in KILLED[name].batches}
        asked = {"servers": url, "queries": queries(some, batch)}
        with stopping_driver(root / f"{batch}.json", **asked) as process:

            def alive(process: subprocess.Popen[bytes] = process, batch: int = batch) -> None:
                assert process.poll() is None, (root / f"{batch}.log").read_text()[-3000:]

            for name, directory in some.items():
                wait_until((directory / "at").exists, name, alive=alive, deadline=DEADLINE)
        for name, directory in some.items():
            check_point(KILLED[name], directory, batch)
            (directory / "at").unlink()
        if batch == 0:
            # Nobody reads meanwhile, so that all of it is the next micro-batch.
            for place, count in COUNTS.items():
                write(url, place, count, count)
    last = {"servers": url, "to_the_end": True, "queries": queries(places, -1)}
    with stopping_driver(root / "last.json", **last) as process:
        assert process.wait(DEADLINE) == 0, (root / "last.log").read_text()[-3000:]
    return places


def queries(places: dict[str, Path], batch: int) -> list[dict[str, Any]]:
    """Those of ``places``, each stopped at its point in the micro-batch ``batch``."""
    asked = ((KILLED[name], directory) for name, directory in places.items())
    return [query(one.read, one.place, place, one.point, batch) for one, place in asked]


def check_point(one: Point, directory: Path, batch: int) -> None:
    """It is where it should be: in the offset log, not in the commit log, in the sink or not."""
    offsets, commits = directory / "checkpoint" / "offsets", directory / "checkpoint" / "commits"
    assert [(offsets / str(i)).exists() for i in (batch, batch + 1)] == [True, False]
    assert [(commits / str(i)).exists() for i in range(batch + 1)] == [True] * batch + [False]
    written = len(list((directory / "rows").glob(f"{batch}-*.json")))
    assert written == (one.splits(batch) if one.point == "written" else 0)


@pytest.mark.parametrize("name", KILLED)
def test_driver_killed(killed: dict[str, Path], name: str) -> None:
    """A driver is killed in its first micro-batch, and the next driver in the next one."""
    one = KILLED[name]
    count = COUNTS[one.place]
    assert stored_rows(killed[name]) == one.read.rows(count, later=count)
    # What was written and not committed came again: the same rows, however they were split.
    came = Counter(
        (seq, value)
        for attempt in (killed[name] / "rows").glob("*.json.*")
        for seq, value in json.loads(attempt.read_text())
    )
    assert sorted(map(list, came)) == stored_rows(killed[name])
    again = one.batches if one.point == "written" else ()
    assert {times for (seq, _), times in came.items() if int(seq > count) in again} <= {2}
    assert {times for (seq, _), times in came.items() if int(seq > count) not in again} <= {1}


def test_task_retried(nats_server: NatsServer, tmp_path: Path) -> None:
    """The same split, read by another attempt; the first one's rows are not in the sink."""
    reads = (KV, CURRENT, STREAM, BATCH_OF_CURRENT, BATCH_OF_A_STREAM)
    points = tuple((read, point) for point in ("task fails", "task dies") for read in reads)
    run_to_the_end(nats_server, tmp_path, points, "local[3,4]")


SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.multiplier": "1.1",
    "spark.executor.memory": "512m",
}


def test_task_attempts_overlap(nats_server: NatsServer, tmp_path: Path) -> None:
    """Two attempts read the same split at the same time (``spark.speculation``)."""
    home, work = Path(pyspark.__file__).parent, tmp_path / "cluster"
    work.mkdir()
    reads = (KV, STREAM, BATCH_OF_A_STREAM)  # those with several splits: Spark compares their times
    with standalone(home, work, workers=0) as cluster:
        for _ in range(2):  # of four cores, one is free at least
            cluster.add_worker(cores=2)
        points = tuple((read, "task slow") for read in reads)
        directories = run_to_the_end(nats_server, tmp_path, points, cluster.url, SPECULATION)
    for directory in directories:
        assert (directory / "overtaken").exists(), f"{directory.name}: no attempt but the slow one"


def run_to_the_end(
    server: NatsServer,
    directory: Path,
    points: tuple[tuple[Read, str], ...],
    master: str,
    conf: dict[str, str] | None = None,
) -> list[Path]:
    """Run a driver whose tasks fail at ``points``; the driver must end successfully.

    Returns:
        the directory of each.
    """
    create(server.url, "small")
    directories = [directory / f"{read}, {point}" for read, point in points]
    asked = {
        "servers": server.url,
        "master": master,
        "conf": conf or {},
        "to_the_end": True,
        "queries": [
            query(read, "small", place, point)
            for (read, point), place in zip(points, directories, strict=True)
        ],
    }
    with stopping_driver(directory / "request.json", **asked) as process:
        code = process.wait(DEADLINE)
        assert code == 0, (directory / "request.log").read_text()[-3000:]
    for (read, _), place in zip(points, directories, strict=True):
        assert (place / "at").exists(), f"{place.name}: no attempt has met its trouble"
        assert stored_rows(place) == read.rows(COUNTS["small"])
    wait_until(lambda: not consumers(server), "no consumer is left", deadline=600)
    return directories
