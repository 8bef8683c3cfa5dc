"""Collecting the evidence of a soak: sinks, checkpoints, events."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.soak import collect


def test_complete_attempts_in_partition_order(tmp_path: Path) -> None:
    def part(attempt: str, number: int, *sequences: int, complete: bool = True) -> None:
        folder = tmp_path / "stream" / "00000000" / attempt
        folder.mkdir(parents=True, exist_ok=True)
        when = pa.array([0] * len(sequences), pa.timestamp("us", tz="UTC"))
        columns = {
            "sequence": pa.array(sequences, pa.int64()),
            "subject": [f"events.put.{seq}" for seq in sequences],
            "data": [b"x"] * len(sequences),
            "stream_created": when,
        }
        pq.write_table(pa.table(columns), folder / f"part-{number:05}-abc.snappy.parquet")
        if complete:
            (folder / "_SUCCESS").touch()

    part("1000", 0, 1, 2, complete=False)
    part("1001", 1, 3)
    part("1001", 0, 1, 2)
    (tmp_path / "stream" / "00000001" / "1002").mkdir(parents=True)  # an attempt without a file

    found = collect.attempts(tmp_path, "stream")

    assert list(found) == [0]
    assert [[row.seq for row in rows] for rows in found[0]] == [[1, 2, 3]]
    assert found[0][0][0].key == "put.1"


def test_failures_and_reports(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [
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
    path.write_text("".join(json.dumps(one) + "\n" for one in lines) + '{"event": "ba')

    events = collect.read_events(path)

    assert events.failures == {"ConnectError": 1, "unexpected": 1}
    assert (events.lost, events.lost_at) == ({"stream": "gone"}, {"stream": 4})
    assert len(events.unexpected) == 1
    assert events.rows == {"full": 9}
    assert events.reported_at == {"full": [2, 6]}
    assert (events.serial, events.reconciled, events.reconciled_at) == (1, 4, 7)
    assert not collect.is_reading(path, 1)
