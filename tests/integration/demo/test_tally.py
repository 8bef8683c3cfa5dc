"""The demo's figures, computed from the progress reports of a query."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nats_stream_source.demo.job import Tally, tally


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
        # A batch without rows adds its sequences, but not its time.
        ([progress(0, 10, 12, 12)], Tally(0, 0, 0.0, 2, 0, 0)),
        # The first batch after a restart has no latest offset.
        ([progress(3, 10, 13, None)], Tally(3, 1, 0.5, 0, 0, 0)),
    ],
)
def test_tally(reports: list[dict[str, Any]], expected: Tally) -> None:
    assert tally(reports) == expected


def test_tally_accumulates() -> None:
    before = tally([progress(6, None, 10, 30)])
    assert tally([progress(20, 10, 30, 30)], before) == Tally(26, 2, 1.0, 4, 20, 0)
    assert Tally(26, 2, 2.0).rate == 13
    assert Tally().rate == 0
