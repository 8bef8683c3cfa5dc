"""The time between the commits of a follower."""

from __future__ import annotations

import pytest

from nats_stream_source.delta.follower.pace import Pace
from nats_stream_source.delta.merge_result import MergeResult

ROW = 185  # bytes


@pytest.mark.parametrize(
    ("rate", "written", "seconds"),
    [
        (1_000, 20_000, 0.02),  # the shortest
        (1_000, 40_000, 0.041),
        (20_000, 130_000, 0.02),
        (10, 20_000, 0.076),  # what few puts write is little
        (10, 140_000, 0.5),  # the longest
    ],
)
def test_pace_of_constant_rate_ignores_single_compactions(
    rate: int, written: int, seconds: float
) -> None:
    """Every fiftieth commit has the bytes of a compaction, and the first one those of the start."""
    pace = Pace(0.02)
    pace.add(MergeResult("driver", 1, written_bytes=60_000, changed_bytes=100_000), 0.5)
    for number in range(4_000):
        changed = max(1, int(rate * pace.seconds)) * ROW
        of_commit = written + 50 * (number % 50 == 0) * written // 20
        result = MergeResult("driver", 1, written_bytes=of_commit, changed_bytes=changed)
        pace.add(result, pace.seconds)
    assert pace.seconds == pytest.approx(seconds, rel=0.15)
