"""Batch reads for the scenarios: each kind of batch, its options, and the rows without Spark."""

from __future__ import annotations

from collections.abc import Callable

from batch_reads import batch_reader, tasks_of

from faults.reading import Each
from faults.rows import Row, rows_of
from faults.trial import Trial
from nats_stream_source.source.runtime import drop_kept_runners

BATCHES = ("now", "as of", "all", "stream")


def kind_of(what: str) -> str:
    """Which trial a batch reads."""
    return "stream" if what == "stream" else "kv"


def options_of(trial: Trial, what: str) -> dict[str, str]:
    """Options for all that was acknowledged until now; in several tasks where that can be."""
    if what == "stream":
        return {"stream": trial.name, "minPartitions": "4"}
    more = {
        "as of": {"asOfSequence": str(trial.last)},
        "all": {"includeHistory": "true", "minPartitions": "4"},
    }
    return {"bucket": trial.name, **more.get(what, {})}


def read(
    url: str,
    options: dict[str, str],
    between: Callable[[], object] | None = None,
    each: Each | None = None,
) -> list[Row]:
    """The rows, in the order of their sequences.

    Args:
        between: called when it is planned.
        each: called between record batches, with how many rows there are so far.
    """
    try:
        return read_and_keep(url, options, between, each)
    finally:
        drop_kept_runners()


def read_and_keep(
    url: str,
    options: dict[str, str],
    between: Callable[[], object] | None = None,
    each: Each | None = None,
) -> list[Row]:
    """The same; the connection is kept for the next one, as a Python worker of Spark's does."""
    reader = batch_reader(url, **options)
    tasks = tasks_of(reader)
    if between is not None:
        between()
    rows: list[Row] = []
    for task in tasks:
        for batch in reader.read(task):
            rows += rows_of(batch)
            if each is not None:
                each(len(rows))
    return sorted(rows, key=lambda row: row.seq)
