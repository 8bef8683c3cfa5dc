"""A follower's figures as metrics, under the names that a query of Spark has."""

from __future__ import annotations

import sys
import time
import uuid
from typing import TYPE_CHECKING

from nats_stream_source.delta.merge_result import MergeResult, merge_metrics
from nats_stream_source.metrics.recorder import Lag, start_exporters
from nats_stream_source.metrics.table import FAILURES, INPUT_ROWS, LAST_REPORT, take

if TYPE_CHECKING:
    from nats_stream_source.delta.follower.follower import Follower

_SOURCE = "0"  # a query of Spark numbers its sources


class FollowerMetrics:
    """Serves the figures of one follower.

    Args:
        prometheus: see :func:`nats_stream_source.watch_progress`.
        opentelemetry: likewise.

    Raises:
        ConfigurationError: ``prometheus`` is not a port, or ``"host:port"``.
        MissingPackageError: a package of the extra ``metrics`` is not installed.
    """

    def __init__(self, prometheus: int | str | None, opentelemetry: bool) -> None:
        self._recorder, self._address = start_exporters(prometheus, opentelemetry)
        self._id = str(uuid.uuid4())
        self._label = ""
        self._follower: Follower | None = None
        self._rows = 0

    def start(self, follower: Follower) -> None:
        """The follower runs."""
        self._follower = follower
        self._label = self._recorder.begin(self._id, self._id, f"follow {follower.bucket}")
        self._recorder.pull(self._pull)
        if self._address is not None:
            print(f"metrics: http://{self._address}/metrics", file=sys.stderr)

    def merged(self, result: MergeResult) -> None:
        """A merge has ended."""
        if self._follower is None:
            return
        with self._recorder.guarded():
            merge_metrics(self._recorder, self._follower.location.name, result)(self._label)

    def end(self, *, failed: bool) -> None:
        """The follower has ended."""
        with self._recorder.guarded():
            self._pull()
            if failed:
                self._recorder.add(FAILURES, 1, self._label)
            self._recorder.end(self._id, self._id)
        self._follower = None

    def _pull(self) -> None:
        if self._follower is None:
            return
        progress, recorder, query = self._follower.progress, self._recorder, self._label
        recorder.set(LAST_REPORT, time.time(), query)
        recorder.add(INPUT_ROWS, progress.rows - self._rows, query, _SOURCE)
        self._rows = progress.rows
        recorder.add_counts(take(), query, "executor")
        if progress.behind is not None:
            lag = Lag(progress.behind, progress.seconds_behind)
            recorder.set_lags(query, _SOURCE, {self._follower.stream: lag})
