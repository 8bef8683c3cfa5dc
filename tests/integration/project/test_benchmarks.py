"""The benchmarks run on small sizes and return figures; their values are not tested."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as everything, commits, lookup, planner, reader, several, writing
from benchmarks.support import follower, raw_connection, report
from benchmarks.support.bucket_data import entries, fill_bucket
from nats_stream_source.embedded import NatsServer

DOCS = everything.PAGE.parent


def test_entries_are_reproducible_and_all_different() -> None:
    pairs = list(entries(200, 50, 16))
    assert pairs == list(entries(200, 50, 16))
    assert {key for key, _ in pairs} == {f"key.{i}" for i in range(50)}
    assert len({value for _, value in pairs}) == 200
    assert {len(value) for _, value in pairs} == {16}


def test_reader_reads_every_message() -> None:
    one = reader.measure(16, headers=True, rounds=2, rows=1000)
    assert one["rows"] == 1000
    assert one["over_callback"] == one["reader"]["rate"] / one["callback"] > 0


def test_writing() -> None:
    one = asyncio.run(writing.measure(16, headers=True, rows=500, rounds=2))
    assert tuple(one["ways"]) == writing.WAYS
    assert one["ratio"][writing.BARE] == 1


def test_writing_counts_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reports more messages than the bucket has is an error."""
    publish = raw_connection.publish

    def loses_one(port: int, prepared: list[raw_connection.Piece]) -> int:
        _, count = prepared.pop()
        return publish(port, prepared) + count

    monkeypatch.setattr(raw_connection, "publish", loses_one)
    with pytest.raises(RuntimeError, match="messages are stored"):
        asyncio.run(writing.measure(16, headers=False, rows=1500, rounds=1))


def test_latencies_are_those_of_first_version_with_revision() -> None:
    puts = np.array([0, 1, 2, 3]) * 10**6  # ns; revisions 5 to 8
    visible = [(10 * 10**6, 6), (20 * 10**6, 4), (30 * 10**6, 8)]
    assert follower.latencies(puts, 5, visible).tolist() == [10.0, 9.0, 28.0, 27.0]


def test_planner_plans_every_case(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the smallest bucket that it takes."""
    planner.fill(nats_server.port, 20_000)
    plans = planner.measure(nats_server.url, 1)
    places = {"beginning", "99 %"}
    assert {(one["filters"], one["where"]) for one in plans} == {
        (filters, where) for filters in planner.KEYS for where in places
    }
    assert all(one["rows"] > 0 and one["requests"] > 0 for one in plans)
    assert all(one["limit"] is None or one["rows"] <= one["limit"] for one in plans)


def test_lookup(nats_server: NatsServer) -> None:
    fill_bucket(nats_server.port, "bench", entries(20_000, 20_000), history=1)
    task = lookup.task_run(nats_server, "bench", 20_000, 1)
    assert (task["keys"], task["rows"]) == (20_000, lookup.BATCH)
    assert min(task["rate"], task["own_cpu"]) > 0


def test_several_buckets_are_planned_and_read() -> None:
    one = several.run(20, 5, 2, 0.5)
    assert [plan["touched"] for plan in one["planned"]] == [10, 20]
    assert one["ratio"] > 0


def test_commits() -> None:
    (one,) = commits.run(["2000:100:30"])["commits"]
    assert (one["keys"], one["rows"], one["commits"]) == (2000, 100, 30)
    assert one["data"] > 0.5
    assert one["files"] <= one["most_files"]


def test_stored_figures_have_tables_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's tables are those of the stored figures."""
    known = json.loads(everything.FIGURES.read_text())
    page = everything.PAGE.read_text()
    monkeypatch.setattr(everything, "PAGE", tmp_path / "page.md")
    everything.PAGE.write_text(page)
    everything.render(known)
    assert everything.PAGE.read_text() == page
    assert set(everything.FULL) == set(report.SECTIONS)
    pictures = {path.name for path in (tmp_path / "performance").iterdir()}
    assert pictures == {path.name for path in (DOCS / "performance").iterdir()}
