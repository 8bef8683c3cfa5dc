"""The benchmarks run on small sizes and return figures; their values are not tested."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import __main__ as everything
from benchmarks import (
    commits,
    framing,
    freshness,
    jetstream,
    latency,
    lookup,
    planner,
    reader,
    writing,
)
from benchmarks.support import machine, raw_connection, raw_publish, report
from benchmarks.support.bucket_data import entries, fill_bucket, write_parquet
from benchmarks.support.delta_merge import MergeResult
from benchmarks.support.planner_bucket import KEYS, fill
from benchmarks.support.progress import progress, with_timeout
from nats_stream_source.embedded import NatsServer
from nats_stream_source.wire.framing import scanner
from tests.support.paths import ROOT

MACHINE = {"cores": 2, "load": 0.1, "python": "3.11.7", "versions": {"python": "2.4"}}
OTHERS = {"share": 0.25, "load": 1.5}


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


def test_parquet_has_every_entry_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's border loses none."""
    monkeypatch.setattr("benchmarks.support.bucket_data._CHUNK", 10)
    write_parquet(tmp_path / "entries.parquet", entries(35, 7))
    table = pq.read_table(tmp_path / "entries.parquet").to_pydict()
    assert list(zip(table["key"], table["value"], strict=True)) == list(entries(35, 7))


def test_reader() -> None:
    one = reader.measure(16, headers=True, rounds=2, rows=1000)
    assert (one.rows, one.watch_lost, len(one.rounds)) == (1000, 0, 2)
    figures = one.as_dict()
    assert figures["over_callback"] == one.reader.rate / one.callback > 0
    assert figures["over_watch"] == one.reader.rate / one.watch > 0
    names = list(scanner.available())
    assert one.scanner == names[0]
    assert (one.python is None) == (names == ["python"])


def test_framing(capsys: pytest.CaptureFixture[str]) -> None:
    framing.main(["--rounds", "1"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert [row[0].strip() for row in rows] == [case.name for case in framing.CASES]
    assert all(float(row[3].replace(",", "")) > 0 for row in rows)


def test_jetstream() -> None:
    outcome = asyncio.run(jetstream.measure(200, 1))
    assert {one.what for one in outcome.results} == {"Direct Get", "watch", "ordered", "put"}
    assert all(one.rate > 0 for one in outcome.results)
    # `measure` raises for the others; watches of nats-py lose messages at times.
    assert all(not one.lost for one in outcome.results if one.way != jetstream.NATS_PY)
    figures = outcome.as_dict()["results"]
    assert all(one["over_bare"] == 1 for one in figures if one["way"] == jetstream.BARE)
    assert all(one["over_nats_py"] == 1 for one in figures if one["way"] == jetstream.NATS_PY)


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


def test_put_steadily(shared_server: NatsServer) -> None:
    fill_bucket(shared_server.port, "bench", iter([("key.0", b"12345678")]), history=64)
    before = time.time_ns()
    latency.put_times(shared_server.port, 10_000, 500)
    with raw_connection.RawConnection(shared_server.port) as connection:
        state = connection.request("$JS.API.STREAM.INFO.KV_bench", {})["state"]
        assert state["last_seq"] == 501
    assert time.time_ns() - before >= 500 / 10_000 * 1e9


def test_planner(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the smallest bucket that it takes."""
    monkeypatch.setattr(planner, "_SECONDS", 0.2)
    fill(nats_server, 20_000, 2000)
    plans, divisions, rests = planner.measure(nats_server, 2)
    places = {"beginning", "half", "99 %", "last 5000"}
    assert {(one.filters, one.where) for one in plans} == {
        (filters, where) for filters in KEYS for where in places
    }
    assert all(one.rows > 0 and one.requests > 0 for one in plans)
    assert all(one.limit is None or one.rows <= one.limit for one in plans)
    assert [one.filters for one in divisions] == list(KEYS)
    assert all(one.largest <= 2 * one.smallest for one in divisions if one.filters != "one narrow")
    assert [(one.filters, one.writes) for one in rests] == [
        *((filters, 0) for filters in KEYS),
        ("one narrow", 200),
        ("fifty", 200),
    ]


def test_lookup() -> None:
    (task,), runs = lookup.measure([20_000], [], 1, 1, spark=False)
    assert (task.keys, task.rows, runs) == (20_000, lookup.BATCH, [])
    assert min(task.rate, task.own_cpu) > 0


def test_steps_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each tenth, without a terminal."""
    with progress("filling", 40) as step:
        for _ in range(20):
            step(2)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" after ")[0] for line in lines] == [
        f"filling: {done} of 40" for done in range(4, 41, 4)
    ]


def test_endless_run_is_error() -> None:
    async def work() -> None:
        await with_timeout(0.01, "idling", asyncio.Event().wait())

    with pytest.raises(RuntimeError, match=r"idling did not end within 0\.01 s"):
        asyncio.run(work())


def test_other_processes_exclude_children() -> None:
    """A child that works all the time does not count as another process."""
    working = "import time\nwhile time.process_time() < 0.3: pass"
    with machine.OtherProcesses() as others:
        before = machine._tree_seconds()
        subprocess.run([sys.executable, "-c", working], check=True)
        assert machine._tree_seconds() - before > 0.25  # CPU time comes in hundredths
    assert 0 <= others.share <= 1
    assert os.getpid() in machine.process_tree(os.getppid())


def test_cpu_by_role() -> None:
    with NatsServer() as server:
        found = machine.cpu_by_role({server.pid: "server"})
    assert set(found) == {"jvm", "planner", "python", "server"}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_pinned_processes_have_one_core_each() -> None:
    before = os.sched_getaffinity(0)
    with NatsServer() as server:
        with machine.pinned(server.pid):
            threads = os.listdir(f"/proc/{server.pid}/task")
            cores = {core for one in threads for core in os.sched_getaffinity(int(one))}
            assert len(cores) == len(os.sched_getaffinity(0)) == 1
            assert cores.isdisjoint(os.sched_getaffinity(0))
        assert os.sched_getaffinity(0) == os.sched_getaffinity(server.pid) == before


READER = {
    "size": 128,
    "headers": False,
    "bare": {"rate": 700_000.0, "own_cpu": 70, "server_cpu": 1500},
    "scanner": "compiled",
    "reader": {"rate": 600_000.0, "own_cpu": 700, "server_cpu": 1600},
    "python": {"rate": 500_000.0, "own_cpu": 900, "server_cpu": 1600},
    "ratio": 0.857,
    "cpu_ratio": 0.8,
    "callback": 150_000.0,
    "over_callback": 4.0,
    "watch": 4000.0,
    "over_watch": 150.0,
    "watch_lost": 3,
    "rounds": [0.8, 0.9],
}
FIGURES: dict[str, dict[str, Any]] = {
    "reader": {
        "reader": [READER],
        "pinned": [READER],
    },
    "jetstream": {
        "jetstream": {
            "results": [
                jetstream.Result("put", "nats-py", 10, 1234.0, 3).as_dict()
                | {"over_bare": 0.1, "over_nats_py": 1.0}
            ]
        }
    },
    "spark": {
        "spark": [
            {
                "rows": 1000,
                "size": 128,
                "bare": 1_000_000.0,
                "scanner": "compiled",
                "ratios": {"noop": 1.25},
                "results": [
                    {
                        "rows": 1000,
                        "source": source,
                        "sink": "noop",
                        "rate": rate,
                        "batch_rate": rate * 2,
                        "cold": cold,
                        "cpu_ns_per_row": {"jvm": 900.0, "python": 800.0, "server": 700.0},
                    }
                    for source, rate, cold in [
                        ("nats_kv", 500_000.0, {"seconds": 2.0}),
                        ("kafka, 1 partition", 400_000.0, None),
                    ]
                ],
            }
        ]
    },
    "latency": {
        "latency": [
            latency.Result(
                way, "nats_kv", 100, 1000, 180.0, 300.0, 90.0, 20, {"addBatch": 90.0}, OTHERS
            ).as_dict()
            | {"ratio": 1.1}
            for way in (latency.DEFAULTS, latency.CONFIGURED)
        ]
    },
    "freshness": {
        "freshness": [
            freshness.Result(
                way, 1000, 4000, 20_000, 400.0, 700.0, 0.5, 30, 1 << 28, OTHERS
            ).as_dict()
            for way in freshness.WAYS
        ],
        "merge": [MergeResult("spark", 10_000, 5_000, 4.0, 6.0, 2 << 20).as_dict()],
    },
    "commits": {
        "commits": [
            commits.Result(
                100_000,
                350,
                2000,
                0.7,
                64.0,
                26.0,
                179.0,
                10**8,
                0.8,
                0.7,
                0.5,
                1.7,
                10,
                99,
                452 << 20,
                87.0,
                502 << 20,
            ).as_dict()
        ],
    },
    "writing": {
        "writing": [
            writing.Result(
                128,
                False,
                True,
                1000,
                {way: writing.Run(1000.0, 200.0, 3000.0) for way in (writing.BARE, writing.SINK)},
                {writing.BARE: [1.0, 1.0], writing.SINK: [0.7, 0.8]},
            ).as_dict()
        ],
        "spark": [
            {
                "sink": sink,
                "tasks": 2,
                "rows": 1000,
                "rate": 1000.0,
                "cpu": {"server": 1.0, "python": 2.0, "jvm": 3.0},
            }
            for sink in ("nats_kv", "kafka")
        ],
    },
    "several": {
        "buckets": 100,
        "idle": {"planner": 0.03, "server": 0.03, "baseline": 0.01, "requests": 4.8},
        "planned": [{"touched": 10, "p50": 40.0, "worst": 60.0, "requests": 14, "tasks": 1}],
        "reads": [
            {"buckets": 100, "rows": 10, "rows_per_second": 1e5, "planning": 0.1, "tasks": 1}
        ],
        "spark_reads": [{"buckets": 1, "rows": 10, "seconds": 3.0, "micro_batch": 2.0}],
        "ratio": 0.5,
        "spark_ratio": 0.6,
    },
    "lookup": {
        "tasks": [asdict(lookup.TaskRun(100_000, 10_000, 1.2e5, 1700.0, 4300.0))],
        "spark": [asdict(lookup.SparkRun(100_000, 10_000, 0.4, 1.1))],
    },
    "history": {
        "history": {
            "keys": 4000,
            "rows": 350,
            "batches": 60,
            "rate": 1000,
            **{
                f"{of}p{share}_{kind}": 50.0
                for of in ("", "visible_")
                for share in (50, 99)
                for kind in (1, 2)
            },
            "ratio": 1.2,
            "visible_ratio": 1.1,
            "closed": 20,
            "state": 1,
            "written_1": 100,
            "written_2": 120,
        }
    },
    "planner": {
        "planned": [
            {
                "filters": "none",
                "where": "the end",
                "limit": None,
                "p50": 1.5,
                "worst": 4.0,
                "requests": 2,
                "splits": 1,
                "rows": 100,
            }
        ],
        "resting": [
            {
                "filters": "none",
                "writes": 0,
                "planner": 0.004,
                "server": 0.002,
                "baseline": 0.001,
                "requests": 45.0,
            }
        ],
    },
}


@pytest.mark.parametrize("name", report.SECTIONS)
def test_benchmarks_have_tables(name: str) -> None:
    figures = {**FIGURES[name], "machine": MACHINE, "others": OTHERS, "date": "2026-01-01"}
    text = report.block(name, figures, ["performance/x.svg"])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) >= 3
    assert {line.count("|") for line in rows[:3]} == {rows[0].count("|")}
    assert "2 cores" in text
    assert "other processes used 25%" in text
    assert "](performance/x.svg)" in text


def test_pinned_processes_have_own_table() -> None:
    figures = {**FIGURES["reader"], "machine": MACHINE, "others": OTHERS, "date": "2026-01-01"}
    assert "\n\nServer and reader pinned to one core each:\n\n| value" in report.block(
        "reader", figures
    )
    assert "pinned" not in report.block("reader", figures | {"pinned": []})


def test_commits() -> None:
    one = commits.run("2000:100:30")
    assert (one.keys, one.rows, one.commits) == (2000, 100, 30)
    assert one.data > 0.5
    assert one.files <= one.most_files


def test_benchmark_results_are_all_reported() -> None:
    assert set(everything.FULL) == set(report.SECTIONS)
    assert list(everything.QUICK)[-1] == "reader"
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert set(everything.FULL) <= modules


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


def test_page_from_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "PAGE", tmp_path / "performance.md")
    known = {
        name: {**figures, "machine": MACHINE, "others": OTHERS, "date": "2026-01-01"}
        for name, figures in FIGURES.items()
    }
    everything.render(json.loads(json.dumps(known)))
    page = (tmp_path / "performance.md").read_text()
    for name in report.SECTIONS:
        assert f"<!-- bench: {name} -->" in page
    pictures = sorted(path.name for path in (tmp_path / "performance").iterdir())
    assert pictures == [
        f"{name}.svg"
        for name in ("freshness", "latency", "reader", "spark", "table_size", "writing")
    ]
    first = (tmp_path / "performance/spark.svg").read_text()
    everything.render(known)
    assert (tmp_path / "performance.md").read_text() == page
    assert (tmp_path / "performance/spark.svg").read_text() == first
