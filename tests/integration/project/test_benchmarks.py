"""The benchmarks run on small sizes and return figures; their values are not tested."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as everything
from benchmarks import (
    commits,
    framing,
    freshness,
    lookup,
    planner,
    reader,
    writing,
)
from benchmarks.support import machine, raw_connection, raw_publish, report
from benchmarks.support.bucket_data import entries, fill_bucket
from benchmarks.support.planner_bucket import KEYS, fill
from nats_stream_source.embedded import NatsServer

DOCS = everything.PAGE.parent


def test_entries_are_reproducible_and_all_different() -> None:
    pairs = list(entries(200, 50, 16))
    assert pairs == list(entries(200, 50, 16))
    assert {key for key, _ in pairs} == {f"key.{i}" for i in range(50)}
    assert len({value for _, value in pairs}) == 200
    assert {len(value) for _, value in pairs} == {16}


def test_scattered_entries_leave_holes_all_over(shared_server: NatsServer) -> None:
    fill_bucket(shared_server.port, "holes", entries(5000, 500, scattered=True), history=1)
    with raw_connection.RawConnection(shared_server.port) as connection:
        state = connection.request("$JS.API.STREAM.INFO.KV_holes", {})["state"]
    assert state["messages"] == state["num_subjects"] == 500
    assert state["last_seq"] == 5000
    assert state["first_seq"] < 2500


def test_reader_reads_every_message() -> None:
    one = reader.measure(16, headers=True, rounds=2, rows=1000)
    assert (one.rows, len(one.rounds)) == (1000, 2)
    assert one.as_dict()["over_callback"] == one.reader.rate / one.callback > 0


def test_framing(capsys: pytest.CaptureFixture[str]) -> None:
    framing.main(["--rounds", "1"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert [row[0].strip() for row in rows] == [case.name for case in framing.CASES]
    assert all(float(row[3].replace(",", "")) > 0 for row in rows)


def test_writing() -> None:
    measuring = writing.measure(16, headers=True, ids=True, rows=500, rounds=2)
    one = asyncio.run(measuring)
    assert tuple(one.ways) == writing.WAYS
    assert {len(ratios) for ratios in one.ratios.values()} == {2}
    assert one.as_dict()["ratio"][writing.BARE] == 1


def test_writing_counts_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reports more messages than the bucket has is an error."""
    publish = raw_publish.publish

    def loses_one(port: int, prepared: raw_publish.Prepared) -> int:
        piece = prepared.pieces.pop()
        count = prepared.counts.pop()
        return publish(port, prepared) + count if piece else 0

    monkeypatch.setattr(raw_publish, "publish", loses_one)
    with pytest.raises(RuntimeError, match="messages are stored"):
        asyncio.run(writing.measure(16, headers=False, ids=False, rows=1500, rounds=1))


def test_latencies_are_those_of_first_version_with_revision() -> None:
    puts = np.array([0, 1, 2, 3]) * 10**6  # ns; revisions 5 to 8
    visible = [(10 * 10**6, 6), (20 * 10**6, 4), (30 * 10**6, 8)]
    assert freshness.latencies(puts, 5, visible).tolist() == [10.0, 9.0, 28.0, 27.0]


def test_planner_plans_every_case(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the smallest bucket that it takes."""
    fill(nats_server, 20_000, 2000)
    plans = asyncio.run(planner.measure(nats_server, 1))
    places = {"beginning", "half", "99 %", "last 5000"}
    assert {(one.filters, one.where) for one in plans} == {
        (filters, where) for filters in KEYS for where in places
    }
    assert all(one.rows > 0 and one.requests > 0 for one in plans)
    assert all(one.limit is None or one.rows <= one.limit for one in plans)


def test_lookup() -> None:
    (task,), runs = lookup.measure([20_000], [], 1, 1, spark=False)
    assert (task.keys, task.rows, runs) == (20_000, lookup.BATCH, [])
    assert min(task.rate, task.own_cpu) > 0


def test_other_processes_exclude_children() -> None:
    """A child that works all the time does not count as another process."""
    working = "import time\nwhile time.process_time() < 0.3: pass"
    with machine.OtherProcesses() as others:
        before = machine._tree_seconds()
        subprocess.run([sys.executable, "-c", working], check=True)
        assert machine._tree_seconds() - before > 0.25  # CPU time comes in hundredths
    assert 0 <= others.share <= 1
    assert os.getpid() in machine.process_tree(os.getppid())


def test_commits() -> None:
    one = commits.run("2000:100:30")
    assert (one.keys, one.rows, one.commits) == (2000, 100, 30)
    assert one.data > 0.5
    assert one.files <= one.most_files


def test_page_blocks_only_are_replaced() -> None:
    page = "# Performance\n\nProse.\n\n<!-- bench: reader -->\nold\n<!-- /bench -->\n\nMore.\n"
    again = report.replace_block(page, "reader", "\nnew \\1\n")
    assert again == page.replace("old", "\nnew \\1")
    longer = report.replace_block(page, "latency", "\ntable\n")
    assert longer.startswith(page.rstrip())
    assert (
        "## Latency from put to `foreachBatch` and to a table\n\n<!-- bench: latency -->\n\ntable\n"
        in longer
    )
    assert report.replace_block(longer, "latency", "\ntable\n") == longer


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
