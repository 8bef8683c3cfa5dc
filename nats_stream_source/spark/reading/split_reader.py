"""The reader of a split: runs on an executor, once per attempt of a task.

It reads the planned range with an ordered consumer and yields record batches; a range of a few
sequences is read with single requests where that is cheaper (``spark.reading.small_range``). After
the last message it verifies that the stream is still the planned one
(``spark.reading.read_verifier``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa

from nats_stream_source.jetstream.api import StreamInfo
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.spark.formats.base import FormatAdapter
from nats_stream_source.spark.formats.splits import Split
from nats_stream_source.spark.reading.event_loop import cached_runner
from nats_stream_source.spark.reading.range_reader import read_range
from nats_stream_source.spark.reading.read_verifier import (
    ReadVerifier,
    check_created,
    verified_stream_info,
)
from nats_stream_source.spark.reading.small_range import small_range
from nats_stream_source.wire.frames import Frames


def read_split(
    split: Split, adapter: FormatAdapter, outage_timeout: float = 0.0, *, running: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a split in the order of their sequences.

    Args:
        outage_timeout: seconds to wait for servers that are away. Until this process has been
            connected, ``connect_timeout`` applies instead, unless the query is ``running``.

    Raises:
        DataLossError: the stream was re-created or rolled back; or messages of the range aged out
            before they were read, and ``failOnDataLoss`` is set.
        ConsumerLostError, MinLastSequenceError, ConnectError, …: see ``jetstream.ordered.reader``.
    """
    runner = cached_runner(adapter.connection)
    waits = running or runner.connection.was_connected
    runner.outlive_outages(outage_timeout if waits else 0.0)
    if not waits:
        runner.retry_transient(runner.connection.connection)
        runner.outlive_outages(outage_timeout)
    verifier = ReadVerifier(split)
    small = runner.retry_transient(lambda: _read_small_range(runner.connection, split, adapter))
    if small is not None:
        frames, info = small
        check_created(info, split)
        verifier.add(frames)
        verifier.verify(info, runner, adapter)
        yield from adapter.rows(frames, split)
        return
    with contextlib.closing(read_range(runner, split, adapter)) as batches:
        for frames in batches:
            verifier.add(frames)
            yield from adapter.rows(frames, split)
    verifier.verify(verified_stream_info(runner, split, adapter), runner, adapter)


async def _read_small_range(
    connection: ReusableConnection, split: Split, adapter: FormatAdapter
) -> tuple[Frames, StreamInfo] | None:
    return await small_range(await connection.jetstream(), split, headers_only=adapter.headers_only)
