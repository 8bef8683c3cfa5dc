"""The rows of the splits of one task of a batch, by the kind of the read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import pyarrow as pa

from nats_stream_source.rows.base import FormatAdapter, Split, StateSplit
from nats_stream_source.spark.reading.as_of import read_as_of
from nats_stream_source.spark.reading.latest_values import read_latest_values
from nats_stream_source.spark.reading.split_reader import read_splits


def batch_rows(splits: Sequence[Split], adapter: FormatAdapter) -> Iterator[pa.RecordBatch]:
    """Yield the rows of splits, which are all of one kind, and report what was left out."""
    states = [split for split in splits if isinstance(split, StateSplit)]
    if not states:
        return adapter.reported(read_splits(splits, adapter))
    read = read_as_of if states[0].as_of else read_latest_values
    return adapter.reported(chain.from_iterable(read(split, adapter) for split in states))
