"""The offsets of this package's sources in Spark's progress reports, and what they carry.

The end of the stream, which the planner reports for the lag (since Spark 4.2), is in no checkpoint.
So it has a further field, :data:`REPORT`: what the planner counted since its start, and the
estimated bytes behind. An executor cannot add to it; ``spark.task_counts`` is its way.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import OffsetError
from nats_stream_source.metrics.counts import Counts
from nats_stream_source.rows.offsets import Offset, Position, lag_between

REPORT = "report"


@dataclass(frozen=True, slots=True)
class PlannerReport:
    """What a planner reports with the end of the stream.

    Attributes:
        counts: the counts of its process, since its start.
        bytes_behind: estimated, by stream; without those that are 0.
    """

    counts: Counts
    bytes_behind: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """The field's value; empty if there is nothing to report."""
        json: dict[str, Any] = {}
        if self.counts:
            json["counts"] = [[*key, amount] for key, amount in self.counts.items()]
        if self.bytes_behind:
            json["bytes_behind"] = dict(self.bytes_behind)
        return json

    @classmethod
    def parse(cls, latest: Any) -> PlannerReport:
        """From the reported end of the stream; an empty report if it has none."""
        report = (_object(latest) or {}).get(REPORT, {})
        counts: Counts = Counter()
        for *key, amount in report.get("counts", ()):
            counts[tuple(key)] = amount
        return cls(counts, report.get("bytes_behind", {}))


def positions(value: Any) -> tuple[Mapping[str, Position], tuple[str, ...]]:
    """The positions and filters of an offset of a report; empty for one of another source."""
    try:
        if (loaded := _object(value)) is not None:
            offset = Offset.parse(loaded)
            return offset.streams, offset.filter
    except OffsetError:
        pass
    return {}, ()


def lag(end: Position, newest: Position | None) -> tuple[int | None, float | None]:
    """Rows and seconds between two positions; None if unknown."""
    if newest is None or newest.epoch != end.epoch:
        return None, None
    return lag_between(end, newest)


def _object(value: Any) -> Mapping[str, Any] | None:
    try:
        loaded = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return loaded if isinstance(loaded, Mapping) else None
