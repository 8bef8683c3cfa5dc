"""The table of all metrics: name, kind, unit, labels, help, and where each value comes from.

The names are those that Prometheus reads, without the prefix. Where Spark's Kafka source has a
metric, the name is Kafka's, as Prometheus writes names (``minOffsetsBehindLatest`` is
``min_offsets_behind_latest``). Each metric also has the label ``query``.

**Origins.** Spark does not pass on metrics of a Python source. The values come:

- from Spark's progress reports, by a listener in the driver's process.
- from the merges, which run in the driver's process.
- counted where it happens (:func:`count`), in any process. The planner's counts travel with the
  offset that it reports for the lag; those of a task with an accumulator.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

PREFIX = "nats_stream_source_"

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: without :data:`PREFIX`, and without ``_total`` of a counter.
        unit: ``seconds`` or ``bytes``, or what is counted.
        help: one sentence.
        labels: in order, without ``query``.
        buckets: upper bounds of a histogram.
    """

    kind: Kind
    name: str
    unit: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """The name that Prometheus reads; of a histogram, without ``_bucket``."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


_gauge, _counter, _histogram = (partial(Metric, kind) for kind in get_args(Kind))
_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_FRESHNESS_BUCKETS = (0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60, 300, 900, 3600, 86400)

_SOURCE = ("source",)
_STREAM = ("source", "stream")
_TABLE = ("table",)
_PROCESS = ("process",)
_TARGET = ("target",)

# -- Spark's progress ---------------------------------------------------------------------------

ACTIVE = _gauge("query_active", "", "1 while the query runs, 0 after its end.", ())
FAILURES = _counter("query_failures", "queries", "Queries that ended with an error.", ())
LAST_REPORT = _gauge(
    "last_report_timestamp_seconds",
    "seconds",
    "Time of Spark's last report: a micro-batch, or an idle query (every 10 s). An older one shows "
    "a query that waits for a server, or a long micro-batch.",
    (),
)
OFFSETS_BEHIND = _gauge(
    "offsets_behind_latest",
    "rows",
    "Rows between the end of the last micro-batch and the end of the stream at its planning.",
    _STREAM,
)
SECONDS_BEHIND = _gauge(
    "seconds_behind_latest", "seconds", "Time between the messages at these two ends.", _STREAM
)
BYTES_BEHIND = _gauge(
    "estimated_bytes_behind_latest",
    "bytes",
    "The rows behind, times the mean size of a message of the stream.",
    _STREAM,
)
MIN_BEHIND = _gauge(
    "min_offsets_behind_latest",
    "rows",
    "Rows behind of the stream of the source that has the fewest.",
    _SOURCE,
)
MAX_BEHIND = _gauge(
    "max_offsets_behind_latest",
    "rows",
    "Rows behind of the stream of the source that has the most.",
    _SOURCE,
)
AVG_BEHIND = _gauge(
    "avg_offsets_behind_latest", "rows", "Mean of the rows behind of the source's streams.", _SOURCE
)
TOTAL_BYTES_BEHIND = _gauge(
    "estimated_total_bytes_behind_latest",
    "bytes",
    "Sum of the estimated bytes behind of the source's streams.",
    _SOURCE,
)
PROBLEM = _gauge(
    "source_problem", "", "1 if the query cannot resume; only from `inspect --prometheus`.", _STREAM
)
INPUT_ROWS = _counter("input_rows", "rows", "Rows that Spark received from the source.", _SOURCE)
STEP_SECONDS = _histogram(
    "batch_step_seconds",
    "seconds",
    "Duration of the steps of a micro-batch, by Spark's names; triggerExecution is all of it.",
    ("step",),
    _STEP_BUCKETS,
)

# -- merges -------------------------------------------------------------------------------------

MERGES = _counter("merges", "merges", "Micro-batches that were merged.", ("table", "engine"))
MERGED_ROWS = _counter(
    "merged_rows",
    "rows",
    "Rows that merges inserted, updated or deleted. A marked row counts as inserted or updated.",
    ("table", "change"),
)
CONTRADICTIONS = _counter(
    "contradicted_sequences",
    "sequences",
    "Sequences of a key that had events with different values, of which one counts.",
    _TABLE,
)
FRESHNESS = _histogram(
    "freshness_seconds",
    "seconds",
    "Age of the newest entry of a merge (its `created`) when the merge was committed.",
    _TABLE,
    _FRESHNESS_BUCKETS,
)
NEWEST = _gauge(
    "newest_row_timestamp_seconds",
    "seconds",
    "`created` of the newest entry that was merged.",
    _TABLE,
)
CHANGED_BYTES = _counter(
    "changed_bytes",
    "bytes",
    "Size in Arrow of the rows that merges inserted or updated. Not for Spark's engine.",
    _TABLE,
)
WRITTEN_BYTES = _counter(
    "written_bytes",
    "bytes",
    "Size of the objects that merges and compactions wrote. Not for Spark's engine.",
    _TABLE,
)
FILES = _gauge(
    "table_files", "files", "Live data files of the table. Not for Spark's engine.", _TABLE
)
COMPACTED = _counter("compacted_files", "files", "Data files that compaction replaced.", _TABLE)
COMPACTIONS = _counter("compactions", "compactions", "Data files that compaction wrote.", _TABLE)
VACUUMED = _counter("vacuumed_files", "files", "Expired files that were deleted.", _TABLE)
INDEX_KEYS = _gauge("index_keys", "keys", "Keys in the driver's index.", _TABLE)
INDEX_BYTES = _gauge("index_bytes", "bytes", "Memory of the driver's index.", _TABLE)

# -- events -------------------------------------------------------------------------------------

INPUT_BYTES = _counter(
    "input_bytes", "bytes", "Size in Arrow of the rows that tasks read.", ("stream",)
)
REBUILDS = _counter(
    "consumer_rebuilds",
    "rebuilds",
    "Ordered consumers that were lost and rebuilt, by reason.",
    ("stream", "reason", "process"),
)
RETRIES = _counter(
    "retries",
    "retries",
    "Requests and connections that were tried again while a server was unavailable.",
    _PROCESS,
)
OUTAGES = _counter(
    "outages",
    "outages",
    "Outages of servers that were waited out; those that end within connectTimeout do not count.",
    _PROCESS,
)
OUTAGE_SECONDS = _counter("outage_seconds", "seconds", "Duration of these outages.", _PROCESS)
DATA_LOSSES = _counter(
    "data_losses_accepted",
    "losses",
    "Data losses that failOnDataLoss=false accepted.",
    ("stream", "process"),
)
SINK_ROWS = _counter("sink_rows", "rows", "Rows that a sink was given and has finished.", _TARGET)
SINK_ACKS = _counter("sink_pub_acks", "rows", "Rows that the server acknowledged.", _TARGET)
SINK_DUPLICATES = _counter(
    "sink_duplicates", "rows", "Acknowledged rows that an earlier attempt had stored.", _TARGET
)
SINK_CONFLICTS = _counter(
    "sink_conflicts",
    "rows",
    "Rows that were not stored because of a conflict (onConflict=skip).",
    _TARGET,
)

METRICS: dict[str, Metric] = {
    one.name: one for one in list(globals().values()) if isinstance(one, Metric)
}
"""All metrics by their names, in the order of the table."""

Counts = Counter[tuple[str, ...]]
"""Amounts by a metric's name and the values of its labels, without ``query`` and ``process``."""

_lock = threading.Lock()
_counts: Counts = Counter()


def count(metric: Metric, *labels: str, amount: float = 1) -> None:
    """Add to a counter; ``labels`` are the values of its labels in order, without ``process``."""
    key = (metric.name, *labels)
    with _lock:
        _counts[key] += amount  # type: ignore[assignment]  # seconds are floats


def take() -> Counts:
    """The counts since the last call."""
    with _lock:
        taken = _counts.copy()
        _counts.clear()
    return taken
