"""Spark comes to grief at each point of a micro-batch; nothing is lost, nothing comes twice.

Drivers of their own (``point_driver.py``) are killed (-9) after a micro-batch was planned, while it
is read, and after the sink wrote it, each before it was committed, in the first one and a later
one; tasks fail, die and are overtaken. A new driver goes on from the same checkpoint and sink. The
oracle: what was written, each value once and in the order of its sequence.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
import pytest
from buckets import api, create_bucket, publish
from leftovers import consumers, descendants
from scenario import eventually
from sparks.cluster import standalone

from nats_stream_source.embedded import NatsServer

pytestmark = pytest.mark.faults

FIRST, LATER = 30_000, 30_000
"""Messages of a KB before and after the first micro-batch: more than fits between a reader that
waits and the server, so that a split can be caught in the middle."""


@dataclass(frozen=True)
class Point:
    """A query, and where it is stopped."""

    format: str
    point: str
    batch: int


KILLED = {
    f"{one.format}, {one.point}, micro-batch {one.batch}": one
    for one in (
        Point("nats_kv", "planned", 0),
        Point("nats_kv", "reading", 1),
        Point("nats_kv", "written", 0),
        Point("nats_stream", "planned", 1),
        Point("nats_stream", "reading", 0),
        Point("nats_stream", "written", 1),
    )
}
OPTIONS = {
    "nats_kv": {"bucket": "points", "includeHistory": "true"},
    "nats_stream": {"stream": "POINTS"},
}
DEADLINE = 1200.0
"""Seconds for a driver to get somewhere; six queries on a busy machine take their time."""


def splits(point: Point) -> int:
    """A split that is caught in the middle is a large one."""
    return 3 if point.format == "nats_stream" and point.point != "reading" else 1


def write(url: str, first: int, count: int) -> None:
    """Numbered values, into the bucket and into the stream; each PubAck awaited."""
    numbers = range(first, first + count)
    for prefix in ("$KV.points.k", "points."):
        publish(url, ((f"{prefix}{i % 500}", b"%012d" % i + bytes(1000), None) for i in numbers))


def query(point: Point, directory: Path) -> dict[str, Any]:
    return {
        "format": point.format,
        "options": {
            "requestTimeout": "30",
            "connectTimeout": "30",
            "minPartitions": str(splits(point)),
            **OPTIONS[point.format],
        },
        "directory": str(directory),
        "point": point.point,
        "batch": point.batch,
    }


@contextlib.contextmanager
def driver(request: Path, asked: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """The driver; at the end it, its JVM and its workers are killed, as with their machine."""
    request.write_text(json.dumps(asked))
    program = Path(__file__).with_name("point_driver.py")
    with request.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(program), str(request)],
            start_new_session=True,  # so that all of them are in the group that is killed
            stdout=log,
            stderr=log,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def standing_still(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop a driver, its JVM and its Python processes for the block.

    So all that is written meanwhile is one micro-batch, and a split of it long enough to be caught
    in the middle.
    """
    stopped: list[int] = []
    try:
        while new := {process.pid, *descendants(process.pid)}.difference(stopped):
            for pid in new:
                stopped.append(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def rows(directory: Path) -> list[list[Any]]:
    """What the sink has, in the order of micro-batches and splits."""

    def order(path: Path) -> tuple[int, ...]:
        return tuple(map(int, path.stem.split("-")))

    found = sorted((directory / "rows").glob("*.json"), key=order)
    return [row for path in found for row in json.loads(path.read_text())]


def create(url: str) -> None:
    create_bucket(url, "points", history=64, max_msgs_per_subject=-1)
    config = {"name": "POINTS", "subjects": ["points.>"], "allow_direct": True}
    api(url, "STREAM.CREATE.POINTS", config)


@pytest.fixture(scope="module")
def killed(shared_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One driver with all queries of KILLED, killed; and one that goes on with them to the end."""
    root, url = tmp_path_factory.mktemp("points"), shared_server.url
    create(url)
    places = {name: root / str(i) for i, name in enumerate(KILLED)}
    queries = [query(KILLED[name], place) for name, place in places.items()]
    write(url, 0, FIRST)
    asked = {"servers": url, "master": "local[8]", "queries": queries}
    with driver(root / "first.json", asked) as process:

        def alive() -> None:
            assert process.poll() is None, (root / "first.log").read_text()[-3000:]

        for name, place in places.items():
            if KILLED[name].batch:
                done = place / "checkpoint" / "commits" / "0"
                eventually(
                    done.exists, f"the first micro-batch of {name!r}", alive, within=DEADLINE
                )
        with standing_still(process):
            write(url, FIRST, LATER)
        for name, place in places.items():
            eventually((place / "at").exists, name, alive, within=DEADLINE)
    for name, place in places.items():
        check_point(KILLED[name], place)
    again = [{**one, "point": "", "batch": -1} for one in queries]
    asked = {"servers": url, "master": "local[4]", "to_the_end": True, "queries": again}
    with driver(root / "second.json", asked) as process:
        assert process.wait(DEADLINE) == 0, (root / "second.log").read_text()[-3000:]
    return places


def check_point(one: Point, place: Path) -> None:
    """It is where it should be: in the offset log, not in the commit log, in the sink or not."""
    number = one.batch
    assert (place / "checkpoint" / "offsets" / str(number)).exists()
    assert not (place / "checkpoint" / "offsets" / str(number + 1)).exists()
    assert not (place / "checkpoint" / "commits" / str(number)).exists()
    written = len(list((place / "rows").glob(f"{number}-*.json")))
    assert written == (splits(one) if one.point == "written" else 0)


@pytest.mark.parametrize("name", KILLED)
def test_the_driver_is_killed(killed: dict[str, Path], name: str) -> None:
    expected = [[i + 1, f"{i:012d}"] for i in range(FIRST + LATER)]
    assert rows(killed[name]) == expected
    # Whoever came to the end of a split had the same rows, also of a micro-batch that came again.
    for attempt in (killed[name] / "rows").glob("*.json.*"):
        assert attempt.read_text() == attempt.with_suffix("").read_text()


@pytest.mark.parametrize("point", ["task fails", "task dies"])
def test_a_task_is_run_again(nats_server: NatsServer, tmp_path: Path, point: str) -> None:
    """The same split, read by another attempt; the first one's rows are not in the sink."""
    run_to_the_end(nats_server, tmp_path, point, tuple(OPTIONS), "local[3,4]")


SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.multiplier": "1.1",
    "spark.executor.memory": "512m",
}


def test_a_task_is_overtaken(nats_server: NatsServer, tmp_path: Path) -> None:
    """Two attempts read the same split at the same time (``spark.speculation``)."""
    home, work = Path(pyspark.__file__).parent, tmp_path / "cluster"
    work.mkdir()
    with standalone(home, work, workers=0) as cluster:
        # Spark starts the other attempt on another host only.
        for host in ("127.0.0.1", "127.0.0.2"):
            worker = cluster.start(
                *(host, "worker.Worker", "--host", host, "--cores", "2", "--memory", "1g"),
                cluster.url,
            )
            worker.find(r"(Successfully registered) with master")
        run_to_the_end(
            nats_server, tmp_path, "task slow", ("nats_stream",), cluster.url, SPECULATION
        )
    assert (tmp_path / "nats_stream" / "overtaken").exists(), "the slow attempt was the only one"


def run_to_the_end(
    server: NatsServer,
    directory: Path,
    point: str,
    formats: tuple[str, ...],
    master: str,
    conf: dict[str, str] | None = None,
) -> None:
    """A driver whose tasks meet ``point``; it must come to its end all the same."""
    create(server.url)
    write(server.url, 0, 3000)
    queries = [query(Point(name, point, 0), directory / name) for name in formats]
    asked = {
        "servers": server.url,
        "master": master,
        "conf": conf or {},
        "to_the_end": True,
        "queries": queries,
    }
    with driver(directory / "request.json", asked) as process:
        code = process.wait(DEADLINE)
        assert code == 0, (directory / "request.log").read_text()[-3000:]
    for name in formats:
        assert (directory / name / "at").exists(), "no attempt has met its trouble"
        assert rows(directory / name) == [[i + 1, f"{i:012d}"] for i in range(3000)]
    eventually(lambda: not consumers(server), "no consumer is left")
