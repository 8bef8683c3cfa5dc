"""The lag of a source as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nats_stream_source.metrics.recorder import Recorder
from nats_stream_source.metrics.table import (
    AVG_BEHIND,
    BYTES_BEHIND,
    MAX_BEHIND,
    MIN_BEHIND,
    OFFSETS_BEHIND,
    SECONDS_BEHIND,
    TOTAL_BYTES_BEHIND,
)


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a source is behind the end of a stream; None where unknown."""

    rows: int | None = None
    seconds: float | None = None
    nbytes: int | None = None


def record_lags(recorder: Recorder, query: str, source: str, lags: Mapping[str, Lag]) -> None:
    """Record the lag of a source, by stream and of all its streams."""
    for stream, behind in lags.items():
        for metric, value in (
            (OFFSETS_BEHIND, behind.rows),
            (SECONDS_BEHIND, behind.seconds),
            (BYTES_BEHIND, behind.nbytes),
        ):
            if value is None:
                recorder.remove(metric, query, source, stream)
            else:
                recorder.set(metric, value, query, source, stream)
    rows = [one.rows for one in lags.values() if one.rows is not None]
    if rows:
        recorder.set(MIN_BEHIND, min(rows), query, source)
        recorder.set(MAX_BEHIND, max(rows), query, source)
        recorder.set(AVG_BEHIND, sum(rows) / len(rows), query, source)
        total = sum(one.nbytes or 0 for one in lags.values())
        recorder.set(TOTAL_BYTES_BEHIND, total, query, source)
