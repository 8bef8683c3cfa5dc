"""The rows of the splits of one task of a batch, by the kind of the read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import pyarrow as pa

from nats_stream_source.rows.base import BatchReadKind, BatchSplit, FormatAdapter
from nats_stream_source.spark.reading.as_of import read_as_of
from nats_stream_source.spark.reading.latest_values import read_latest_values
from nats_stream_source.spark.reading.split_reader import read_splits


def batch_rows(splits: Sequence[BatchSplit], adapter: FormatAdapter) -> Iterator[pa.RecordBatch]:
    """Yield the rows of splits, which are all of one kind, and report what was left out."""
    if splits[0].kind is BatchReadKind.RANGE:
        rows = read_splits([split.split for split in splits], adapter)
    else:
        read = read_latest_values if splits[0].kind is BatchReadKind.CURRENT else read_as_of
        rows = chain.from_iterable(read(split, adapter) for split in splits)
    return adapter.reported(rows)
