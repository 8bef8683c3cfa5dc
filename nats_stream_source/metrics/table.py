"""The table of all metrics: name, kind, unit, labels, help, and where each value comes from.

The names are those that Prometheus reads, without the prefix. Where Spark's Kafka source has a
metric, the name is Kafka's, as Prometheus writes names (``minOffsetsBehindLatest`` is
``min_offsets_behind_latest``). Each metric also has the label ``query``.

**Origins.** Spark passes no metrics of a Python source on, so the values come on three ways:

- from Spark's progress reports, by a listener in the driver's process.
- from the merges, which run in the driver's process.
- counted where it happens (:mod:`nats_stream_source.metrics.counts`). The planner's
  counts travel with the offset that it reports for the lag; those of a task with an accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """The name that Prometheus reads; of a histogram, without ``_bucket``."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")


_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_FRESHNESS_BUCKETS = (0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60, 300, 900, 3600, 86400)

_SOURCE = ("source",)
_STREAM = ("source", "stream")
_TABLE = ("table",)
_PROCESS = ("process",)
_TARGET = ("target",)

# -- Spark's progress ---------------------------------------------------------------------------

ACTIVE = Metric("query_active", "gauge", "", "1 while the query runs, 0 after its end.", ())
FAILURES = Metric("query_failures", "counter", "queries", "Queries that ended with an error.", ())
LAST_REPORT = Metric(
    "last_report_timestamp_seconds",
    "gauge",
    "seconds",
    "Time of Spark's last report: a micro-batch, or an idle query (every 10 s). An older one shows "
    "a query that waits for a server, or a long micro-batch.",
    (),
)
OFFSETS_BEHIND = Metric(
    "offsets_behind_latest",
    "gauge",
    "rows",
    "Rows between the end of the last micro-batch and the end of the stream at its planning.",
    _STREAM,
)
SECONDS_BEHIND = Metric(
    "seconds_behind_latest",
    "gauge",
    "seconds",
    "Time between the messages at these two ends.",
    _STREAM,
)
BYTES_BEHIND = Metric(
    "estimated_bytes_behind_latest",
    "gauge",
    "bytes",
    "The rows behind, times the mean size of a message of the stream.",
    _STREAM,
)
MIN_BEHIND = Metric(
    "min_offsets_behind_latest",
    "gauge",
    "rows",
    "Rows behind of the stream of the source that has the fewest.",
    _SOURCE,
)
MAX_BEHIND = Metric(
    "max_offsets_behind_latest",
    "gauge",
    "rows",
    "Rows behind of the stream of the source that has the most.",
    _SOURCE,
)
AVG_BEHIND = Metric(
    "avg_offsets_behind_latest",
    "gauge",
    "rows",
    "Mean of the rows behind of the source's streams.",
    _SOURCE,
)
TOTAL_BYTES_BEHIND = Metric(
    "estimated_total_bytes_behind_latest",
    "gauge",
    "bytes",
    "Sum of the estimated bytes behind of the source's streams.",
    _SOURCE,
)
PROBLEM = Metric(
    "source_problem",
    "gauge",
    "",
    "1 if the query cannot resume; only from `inspect --prometheus`.",
    _STREAM,
)
INPUT_ROWS = Metric(
    "input_rows", "counter", "rows", "Rows that Spark received from the source.", _SOURCE
)
STEP_SECONDS = Metric(
    "batch_step_seconds",
    "histogram",
    "seconds",
    "Duration of the steps of a micro-batch, by Spark's names; triggerExecution is all of it.",
    ("step",),
    _STEP_BUCKETS,
)

# -- merges -------------------------------------------------------------------------------------

MERGES = Metric(
    "merges", "counter", "merges", "Micro-batches that were merged.", ("table", "engine")
)
MERGED_ROWS = Metric(
    "merged_rows",
    "counter",
    "rows",
    "Rows that merges inserted, updated or deleted. A marked row counts as inserted or updated.",
    ("table", "change"),
)
CONTRADICTIONS = Metric(
    "contradicted_sequences",
    "counter",
    "sequences",
    "Sequences of a key that had events with different values, of which one counts.",
    _TABLE,
)
FRESHNESS = Metric(
    "freshness_seconds",
    "histogram",
    "seconds",
    "Age of the newest entry of a merge (its `created`) when the merge was committed.",
    _TABLE,
    _FRESHNESS_BUCKETS,
)
NEWEST = Metric(
    "newest_row_timestamp_seconds",
    "gauge",
    "seconds",
    "`created` of the newest entry that was merged.",
    _TABLE,
)
CHANGED_BYTES = Metric(
    "changed_bytes",
    "counter",
    "bytes",
    "Size in Arrow of the rows that merges inserted or updated. Not for Spark's engine.",
    _TABLE,
)
WRITTEN_BYTES = Metric(
    "written_bytes",
    "counter",
    "bytes",
    "Size of the objects that merges and compactions wrote. Not for Spark's engine.",
    _TABLE,
)
FILES = Metric(
    "table_files", "gauge", "files", "Live data files of the table. Not for Spark's engine.", _TABLE
)
COMPACTED = Metric(
    "compacted_files", "counter", "files", "Data files that compaction replaced.", _TABLE
)
COMPACTIONS = Metric(
    "compactions",
    "counter",
    "compactions",
    "Data files that compaction wrote.",
    _TABLE,
)
VACUUMED = Metric("vacuumed_files", "counter", "files", "Expired files that were deleted.", _TABLE)
INDEX_KEYS = Metric("index_keys", "gauge", "keys", "Keys in the driver's index.", _TABLE)
INDEX_BYTES = Metric("index_bytes", "gauge", "bytes", "Memory of the driver's index.", _TABLE)

# -- events -------------------------------------------------------------------------------------

INPUT_BYTES = Metric(
    "input_bytes", "counter", "bytes", "Size in Arrow of the rows that tasks read.", ("stream",)
)
REBUILDS = Metric(
    "consumer_rebuilds",
    "counter",
    "rebuilds",
    "Ordered consumers that were lost and rebuilt, by reason.",
    ("stream", "reason", "process"),
)
RETRIES = Metric(
    "retries",
    "counter",
    "retries",
    "Requests and connections that were tried again while a server was unavailable.",
    _PROCESS,
)
OUTAGES = Metric(
    "outages",
    "counter",
    "outages",
    "Outages of servers that were waited out; those that end within connectTimeout do not count.",
    _PROCESS,
)
OUTAGE_SECONDS = Metric(
    "outage_seconds", "counter", "seconds", "Duration of these outages.", _PROCESS
)
DATA_LOSSES = Metric(
    "data_losses_accepted",
    "counter",
    "losses",
    "Data losses that failOnDataLoss=false accepted.",
    ("stream", "process"),
)
SINK_ROWS = Metric(
    "sink_rows", "counter", "rows", "Rows that a sink was given and has finished.", _TARGET
)
SINK_ACKS = Metric(
    "sink_pub_acks", "counter", "rows", "Rows that the server acknowledged.", _TARGET
)
SINK_DUPLICATES = Metric(
    "sink_duplicates",
    "counter",
    "rows",
    "Acknowledged rows that an earlier attempt had stored.",
    _TARGET,
)
SINK_CONFLICTS = Metric(
    "sink_conflicts",
    "counter",
    "rows",
    "Rows that were not stored because of a conflict (onConflict=skip).",
    _TARGET,
)

METRICS: dict[str, Metric] = {
    one.name: one for one in list(globals().values()) if isinstance(one, Metric)
}
"""All metrics by their names, in the order of the table."""
