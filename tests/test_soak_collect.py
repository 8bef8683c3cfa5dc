"""What the soak collects at the end: sinks, checkpoints, events."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from soak import collect
from soak.findings import Entry


def test_only_whole_attempts_count_and_partitions_keep_their_order(tmp_path: Path) -> None:
    def part(attempt: str, number: int, *sequences: int, whole: bool = True) -> None:
        place = tmp_path / "stream" / "00000000" / attempt
        place.mkdir(parents=True, exist_ok=True)
        when = pa.array([0] * len(sequences), pa.timestamp("us", tz="UTC"))
        columns = {
            "sequence": pa.array(sequences, pa.int64()),
            "subject": [f"events.put.{seq}" for seq in sequences],
            "data": [b"x"] * len(sequences),
            "stream_created": when,
        }
        pq.write_table(pa.table(columns), place / f"part-{number:05}-abc.snappy.parquet")
        if whole:
            (place / "_SUCCESS").touch()

    part("1000", 0, 1, 2, whole=False)
    part("1001", 1, 3)
    part("1001", 0, 1, 2)
    (tmp_path / "stream" / "00000001" / "1002").mkdir(parents=True)  # nothing of it was written

    found = collect.attempts(tmp_path, "stream")

    assert list(found) == [0]
    assert [[row.seq for row in rows] for rows in found[0]] == [[1, 2, 3]]
    assert found[0][0][0].key == "put.1"


def test_when_a_micro_batch_was_read_is_when_its_last_attempt_was_over(tmp_path: Path) -> None:
    for attempt, over in (("1000", 50), ("1001", 90)):
        done = tmp_path / "full" / "00000003" / attempt / "_SUCCESS"
        done.parent.mkdir(parents=True)
        done.touch()
        os.utime(done, (over, over))
    row = Entry(7, "put.1", "PUT", b"x")
    # The last attempt may have less: what was purged meanwhile.
    assert collect.spans(tmp_path, "full", {3: [[row], []]}) == ((7, 90.0),)
    assert collect.spans(tmp_path, "full", {}) == ()


def test_how_far_a_query_came_is_what_it_committed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "full"
    for kind in ("offsets", "commits"):
        (checkpoint / kind).mkdir(parents=True)
    assert collect.through(tmp_path, "full") == 0
    for number, seq in ((9, 20), (10, 30), (11, 40)):
        offset = json.dumps({"stream_seq": seq})
        text = offset if number == 9 else f'v1\n{{"batchWatermarkMs":0}}\n{offset}'
        (checkpoint / "offsets" / f"{number}").write_text(text)
    for number in (9, 10):
        (checkpoint / "commits" / f"{number}").touch()
    (checkpoint / "commits" / ".11.crc").touch()
    assert collect.through(tmp_path, "full") == 30
    (checkpoint / "commits" / "10").unlink()
    assert collect.through(tmp_path, "full") == 20


def test_failures_and_reports_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    said = [
        {"at": 1, "event": "started", "serial": 1},
        {"at": 2, "event": "batch", "query": "full", "batch": 0, "start": 0, "end": 9, "rows": 9},
        {
            "at": 3,
            "event": "failed",
            "query": "full",
            "text": "nats_stream_source.errors.ConnectError: no",
        },
        {
            "at": 4,
            "event": "failed",
            "query": "stream",
            "text": "nats_stream_source.errors.DataLossError: gone",
        },
        {"at": 5, "event": "failed", "query": "current", "text": "KeyError: 'Nats'"},
        {"at": 6, "event": "done", "query": "full"},
        {"at": 7, "event": "reconciling"},
        {"at": 8, "event": "reconciled", "before": 4, "result": ""},
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in said) + '{"event": "ba')

    events = collect.events(path)

    assert events.failures == {"ConnectError": 1, "unexpected": 1}
    assert (events.lost, events.lost_at) == ({"stream": "gone"}, {"stream": 4})
    assert len(events.unexpected) == 1
    assert events.rows == {"full": 9}
    assert events.reports == {"full": [2, 6]}
    assert (events.serial, events.reconciled, events.reconciled_at) == (1, 4, 7)
    assert not collect.lively(path, 1)
