"""A bucket as Arrow, without Spark, for DuckDB, Polars and pyarrow.

Planner and readers are those of ``spark.read``. They run in a thread, since the caller's may run an
event loop already, as in a notebook.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from nats_stream_source.options import Mode, kv_options
from nats_stream_source.rows.arrow import arrow_schema
from nats_stream_source.rows.base import Split
from nats_stream_source.rows.formats import KvFormat
from nats_stream_source.spark.planning.batch_planner import plan_batch
from nats_stream_source.spark.reading.batch import batch_rows
from nats_stream_source.spark.runner import close_cached_runners


def read_bucket(bucket: str, **options: str | float | bool) -> pa.RecordBatchReader:
    """Read a bucket as ``spark.read.format("nats_kv")`` does, with the same columns and options.

    ``duckdb.from_arrow(read_bucket("fleet", servers="nats://127.0.0.1:4222"))``

    Rows are read as the caller asks for them, in a thread with a connection of its own. It ends
    with the last row, or when the reader is closed or collected.

    Args:
        bucket: name of the key-value bucket.
        options: options of ``nats_kv`` for ``spark.read`` by their names. By default the rows are
            the last entry of each key; ``includeHistory=True`` reads all revisions,
            ``asOfSequence`` and ``asOfTime`` the bucket as it was.

    Raises:
        OptionError: an option is unknown or invalid.
        BucketNotFoundError: the bucket does not exist.
        ConnectError, RequestTimeoutError, …: the server is unavailable. Later errors are raised by
            the reader.
    """
    adapter = KvFormat(kv_options({**options, "bucket": bucket}, Mode.BATCH))
    with ThreadPoolExecutor(1, "read_bucket") as thread:
        tasks = thread.submit(plan_batch, adapter).result()
    splits = [split for task in tasks for split in task]
    schema = arrow_schema("nats_kv", adapter.options.added_columns)
    return pa.RecordBatchReader.from_batches(schema, _read(splits, adapter))


def _read(splits: list[Split], adapter: KvFormat) -> Iterator[pa.RecordBatch]:
    with ThreadPoolExecutor(1, "read_bucket") as thread:
        rows = batch_rows(splits, adapter) if splits else iter(())
        try:
            while (batch := thread.submit(next, rows, None).result()) is not None:
                yield batch
        finally:
            thread.submit(_close, rows).result()


def _close(rows: Iterator[pa.RecordBatch]) -> None:
    if (close := getattr(rows, "close", None)) is not None:
        close()
    close_cached_runners(threading.get_ident())
