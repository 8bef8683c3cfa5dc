"""``minRowsPerTrigger`` and ``maxTriggerDelay``: which micro-batches wait."""

from __future__ import annotations

import pytest

from nats_stream_source.spark.planning.triggers import TriggerDelay


@pytest.mark.parametrize(
    ("min_rows", "rows", "seconds", "due"),
    [
        (None, 1, 0.0, True),
        (10, 9, 29.9, False),
        (10, 10, 0.0, True),
        (10, 9, 30.0, True),
    ],
)
def test_delay_restarts_after_micro_batch(
    min_rows: int | None, rows: int, seconds: float, due: bool
) -> None:
    now = 100.0
    delay = TriggerDelay(min_rows, 30.0, lambda: now)
    assert delay.is_due(1), "the first one does not wait"
    delay.record()
    now += seconds
    assert delay.is_due(rows) is due
