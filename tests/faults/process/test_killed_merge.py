"""A process that is killed while it writes files again leaves the old or the new table.

A merge writes data files first and commits then, with one file in the log. The test stops the
process (SIGSTOP) at a random point of a merge, looks what it has written, and kills it: before its
data files, between data files and commit, and after the commit. Each of them has to occur.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.delta.table_content import stored

pytestmark = pytest.mark.faults
KEYS = 20_000
ATTEMPTS = 120
SECONDS = 120.0  # for all attempts
STATES = {"before", "between", "after"}

PROGRAM = """
import sys
import pyarrow as pa
from nats_stream_source.delta.driver.engine import DriverEngine
from nats_stream_source.delta.driver.storage import TableStorage
from nats_stream_source.delta.rules.events import EventBatch, EventShape, EventTable
from nats_stream_source.delta.rules.layout import Layout
path, keys, revision = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
entries = pa.table({
    "key": [f"key.{i}" for i in range(keys)],
    "value": [b"%064d" % (i * revision) for i in range(keys)],
    "revision": pa.array([revision] * keys, pa.int64()),
    "operation": ["PUT"] * keys,
    "stream_created": pa.array([0] * keys, pa.timestamp("us", "UTC")),
})
engine = DriverEngine(TableStorage(path, path), False)
shape = EventShape(entries.schema, Layout.of_entries(entries.schema.names, "remove"), computed=True)
engine.merge(EventBatch(shape, EventTable(entries[:0])), None)
print("ready", flush=True)
sys.stdin.readline()
engine.merge(EventBatch(shape, EventTable(entries)), None)
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
