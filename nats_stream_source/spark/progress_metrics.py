"""Spark's progress reports as metrics: lag, rows, durations, and what the planner has counted."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nats_stream_source.metrics.recorder import Lag, Recorder
from nats_stream_source.metrics.table import FAILURES, INPUT_ROWS, LAST_REPORT, STEP_SECONDS, Counts
from nats_stream_source.rows.offsets import PlannerReport, lag, positions

IsActive = Callable[[str, str], bool]
"""Whether Spark reports that this run, of a query and run id, is active."""

_RUNS = 100  # ended runs that are known, so that a second listener does not count them again


class ProgressMetrics:
    """Passes the events of queries to a recorder; several listeners may pass the same events.

    A caller is within :meth:`fed`.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.RLock()
        self._last: dict[str, tuple[str, int, str]] = {}  # run, batch and time, by query
        self._streams: dict[tuple[str, str], set[str]] = {}  # by query and source
        self._planner: dict[tuple[str, str], Counts] = {}  # by run and source
        self._ended: deque[str] = deque(maxlen=_RUNS)
        self._runs: dict[str, tuple[str, IsActive]] = {}  # query, by run

    @contextmanager
    def fed(self) -> Iterator[None]:
        """One event at a time; a failure to record it is logged."""
        with self._lock, self._recorder.guarded():
            yield

    def started(self, query_id: str, run_id: str, name: str | None, is_active: IsActive) -> None:
        """A query has started, or runs already."""
        if run_id not in self._ended:
            self._runs[run_id] = query_id, is_active
            self._recorder.begin(query_id, run_id, name)

    def ask(self) -> None:
        """Remove the gauges of runs that Spark does not report as active any more.

        The event of their end may be lost, or on its way with the last counts.
        """
        # Not under the lock, which listeners wait for: Spark may wait for them.
        for run_id, (query_id, is_active) in self._runs.copy().items():
            with self._recorder.guarded():
                if not is_active(query_id, run_id):
                    self._runs.pop(run_id, None)
                    self._recorder.set_inactive(query_id, run_id)

    def idle(self, query_id: str, run_id: str) -> None:
        """A query runs and has nothing to do."""
        if run_id not in self._ended:
            label = self._recorder.begin(query_id, run_id, None)
            self._recorder.set(LAST_REPORT, time.time(), label)

    def terminated(self, query_id: str, run_id: str, *, failed: bool) -> None:
        """A query has ended."""
        if run_id in self._ended:
            return
        self._ended.append(run_id)
        self._runs.pop(run_id, None)
        label = self._recorder.label(query_id)
        if label is None:
            return
        if failed:
            self._recorder.add(FAILURES, 1, label)
        self._recorder.end(query_id, run_id)
        for known in [key for key in self._planner if key[0] == run_id]:
            del self._planner[known]
        for streams in [key for key in self._streams if key[0] == label]:
            del self._streams[streams]
        self._last.pop(query_id, None)

    def progress(self, report: Mapping[str, Any]) -> None:
        """A micro-batch has ended; ``report`` is an element of ``query.recentProgress``."""
        query_id, run_id = str(report["id"]), str(report["runId"])
        key = (run_id, report["batchId"], report["timestamp"])
        last = self._last.get(query_id)
        if run_id in self._ended or (last and last[0] == run_id and last[1:] >= key[1:]):
            return
        self._last[query_id] = key
        label = self._recorder.begin(query_id, run_id, report["name"])
        self._recorder.set(LAST_REPORT, time.time(), label)
        for step, milliseconds in report["durationMs"].items():
            self._recorder.observe(STEP_SECONDS, milliseconds / 1000, label, step)
        for number, source in enumerate(report["sources"]):
            self._source(label, run_id, str(number), source)

    def _source(self, query: str, run_id: str, number: str, source: Mapping[str, Any]) -> None:
        recorder = self._recorder
        ends, _ = positions(source["endOffset"])
        if not ends:
            return  # of another package
        newest, _ = positions(source["latestOffset"])
        planner = PlannerReport.parse(source["latestOffset"])
        before = self._planner.get((run_id, number), Counter())
        self._planner[run_id, number] = planner.counts
        recorder.add_counts(planner.counts - before, query, "planner")
        recorder.add(INPUT_ROWS, source["numInputRows"], query, number)
        lags = {}
        for stream, end in ends.items():
            rows, seconds = lag(end, newest.get(stream))
            size = None if rows is None else planner.bytes_behind.get(stream, 0)
            lags[stream] = Lag(rows, seconds, size)
        recorder.set_lags(query, number, lags)
        for stream in self._streams.get((query, number), set()) - ends.keys():
            recorder.set_lags(query, number, {stream: Lag()})
        self._streams[query, number] = set(ends)


_lock = threading.Lock()
_shared: tuple[Recorder, ProgressMetrics] | None = None


def progress_metrics(recorder: Recorder) -> ProgressMetrics:
    """The one object that feeds this recorder."""
    global _shared
    with _lock:
        if _shared is None or _shared[0] is not recorder:
            _shared = recorder, ProgressMetrics(recorder)
            recorder.pull(_shared[1].ask)
        return _shared[1]
