"""What golden checkpoints are of: a bucket and a stream, what is written to them, and queries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession

from tests.support.nats import buckets
from tests.support.nats.stored import stored_entries
from tests.support.nats.streams import create_stream, stream_state
from tests.support.spark.streaming_query import run_to_the_end

BUCKET, STREAM = "plant", "ORDERS"
OTHER = "yard"
"""A second bucket, whose keys are not those of the first one."""


@dataclass(frozen=True)
class Case:
    """One query and its checkpoint.

    Attributes:
        options: of the source, beside ``servers``.
        uncommitted: whether its last micro-batch was written to the sink and not committed.
    """

    format: str
    options: dict[str, str]
    uncommitted: bool = False


class SinkError(Exception):
    """The sink fails after it wrote, so that the micro-batch is not committed."""


def shown(row: Row) -> list[Any]:
    """What of a row must be the same in every version."""
    if "revision" in row:
        value = None if row.value is None else bytes(row.value).decode()
        return [row.revision, row.operation, row.key, value, row.initial]
    return [row.sequence, row.subject, bytes(row.data).decode()]


def by_key(row: list[Any]) -> tuple[str, int]:
    """The key, and the revision, of a row of ``nats_kv`` as :func:`shown`."""
    return row[2], row[0]


def go_on(
    spark: SparkSession, url: str, case: Case, checkpoint: Path, fail: bool = False
) -> list[list[Any]]:
    """Run the query to the end of the stream; its rows, as :func:`shown`."""
    rows: list[list[Any]] = []

    def collect(batch: DataFrame, batch_id: int) -> None:
        found = [shown(row) for row in batch.collect()]
        rows.extend(found)
        if fail:
            raise SinkError

    writes = (
        spark.readStream.format(case.format)
        .options(servers=url, **case.options)
        .load()
        .writeStream.foreachBatch(collect)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
    )
    try:
        run_to_the_end(writes.start)
    except StreamingQueryException as error:
        if not fail or "SinkError" not in str(error):
            raise
    return rows


def write(url: str, first: int) -> None:
    """One round of changes, whose values begin at ``first``."""
    keys = ["pump.a", "pump.b", "fan.1", "door", "pump.a"]
    buckets.put_many(url, BUCKET, ((key, b"%d" % (first + i)) for i, key in enumerate(keys)))
    buckets.delete(url, BUCKET, "fan.1")
    buckets.purge(url, BUCKET, "door")
    subjects = ["orders.eu.de", "orders.us", "orders.asia", "orders.eu.fr", "orders.us"]
    messages = [(name, b"%d" % (first + i), None) for i, name in enumerate(subjects)]
    buckets.publish(url, messages)


def create(url: str) -> None:
    """The bucket and the stream."""
    buckets.create_bucket(url, BUCKET, history=5)
    create_stream(url, STREAM, "orders.>", allow_direct=True)


def state_of(url: str, case: Case) -> dict[str, Any]:
    return stream_state(url, case.options.get("stream") or f"KV_{BUCKET}")


def stored(url: str, case: Case, after: int, initial: int = 0) -> list[list[Any]]:
    """What a query must still read after ``after``, read by nats-py.

    Args:
        initial: the last sequence of the initial values, of which it reads those that are left.
    """
    kv = case.format == "nats_kv"
    stream, prefix = (f"KV_{BUCKET}", f"$KV.{BUCKET}.") if kv else (case.options["stream"], "")
    filters = case.options.get("keys" if kv else "filterSubjects")
    rows = []
    for one in stored_entries(url, stream, prefix):
        if one.seq > after and _fits(one.key, filters):
            value = None if one.value is None else one.value.decode()
            row = [one.seq, one.operation, one.key, value, one.seq <= initial]
            rows.append(row if kv else [one.seq, one.key, value])
    if not kv or "includeHistory" in case.options:
        return rows
    # Initial values are those that were not written again.
    last = {row[2]: row[0] for row in rows}
    return [row for row in rows if not row[4] or last[row[2]] == row[0]]


def _fits(name: str, filters: str | None) -> bool:
    """Whether a name matches one of the filters, as far as these tests have them."""
    return filters is None or any(
        name == one or (one[-2:] in (".>", ".*") and name.startswith(one[:-1]))
        for one in filters.split(",")
    )
