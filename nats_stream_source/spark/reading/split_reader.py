"""The reader of a task's splits: runs on an executor, once per attempt of the task.

It reads each planned range with an ordered reader and yields record batches. The reader detects a
stream that was re-created or rolled back meanwhile: then the received rows are not those that the
offsets promise, and the task fails. After the last message the task verifies that no message is
missing (``rows.data_loss``), and that the stream has the messages of other subjects that were
left out (``RangeRequest.prefix``): subjects can be forged.

A task of a query of several streams has many small splits. Their rows are yielded one split after
the other, and meanwhile the next ones begin, up to the first batch of each: the requests of several
splits share a round trip, and the server prepares the next range while this one is converted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from nats_stream_source.errors import DataLossError, ProtocolError, StreamNotFoundError
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_identity import Identity, StreamChangedError
from nats_stream_source.metrics.table import INPUT_BYTES, count
from nats_stream_source.rows.base import FormatAdapter, Split
from nats_stream_source.rows.data_loss import (
    SequenceGapTracker,
    other_messages,
    report_aged_out,
    report_data_loss,
)
from nats_stream_source.spark.runner import cached_runner
from nats_stream_source.wire.consumer.deliveries import Deliveries

_AHEAD = 8
"""Splits that are read at a time."""

_MAX_AHEAD_SEQUENCES = 20_000
"""A longer range begins when it is its turn: it gains nothing, and its consumer would wait."""


def read_splits(
    splits: Sequence[Split],
    adapter: FormatAdapter,
    outage_timeout: float = 0.0,
    *,
    running: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of splits, one after the other, in the order of their sequences.

    Args:
        outage_timeout: seconds to wait for unavailable servers. Until this process has been
            connected, ``connect_timeout`` applies instead, unless the query is ``running``.
    """
    runner = cached_runner(adapter.options.connection)
    runner.connect(outage_timeout, running=running)
    read = runner.iterate(_splits_frames(runner.connection, splits, adapter))
    with contextlib.closing(read):
        for split, frames in read:
            for batch in adapter.rows(frames, split):
                count(INPUT_BYTES, split.range.stream, amount=batch.nbytes)
                yield batch


async def _splits_frames(
    connection: ReusableConnection, splits: Sequence[Split], adapter: FormatAdapter
) -> AsyncGenerator[tuple[Split, Deliveries], None]:
    """Yield the messages of splits, one after the other; read the next ones meanwhile."""
    waiting = deque(splits)
    opened: deque[_OpenSplit] = deque()
    try:
        while waiting or opened:
            while waiting and len(opened) < _AHEAD:
                following = waiting[0].range
                if opened and following.end - following.start > _MAX_AHEAD_SEQUENCES:
                    break
                reading = _split_frames(connection, waiting[0], adapter)
                first = asyncio.ensure_future(_next(reading))
                opened.append(_OpenSplit(waiting.popleft(), reading, first))
            head = opened[0]
            try:
                frames = await head.first
                while frames is not None:
                    yield head.split, frames
                    frames = await _next(head.reading)
            except StreamNotFoundError as error:
                _report_deleted(head.split, adapter, error)
            await opened.popleft().close()
    finally:
        await asyncio.gather(*(one.close() for one in opened))


class _OpenSplit(NamedTuple):
    """A split whose first messages are being read."""

    split: Split
    reading: AsyncGenerator[Deliveries, None]
    first: asyncio.Task[Deliveries | None]

    async def close(self) -> None:
        """End the read, whether it is complete or not."""
        self.first.cancel()
        # Whatever it found belongs to a read that ends for another reason.
        await asyncio.gather(self.first, return_exceptions=True)
        await self.reading.aclose()


async def _next(reading: AsyncGenerator[Deliveries, None]) -> Deliveries | None:
    return await anext(reading, None)


def _report_deleted(split: Split, adapter: FormatAdapter, error: StreamNotFoundError) -> None:
    """A stream that does not exist is a data loss in a query of several, which goes on without."""
    if adapter.stream_set is None:
        raise error
    report_data_loss(
        adapter,
        split.range.stream,
        f"stream was deleted while the range {split.range.bounds} was read: {error}",
        "continue without it",
    )


async def _split_frames(
    connection: ReusableConnection, split: Split, adapter: FormatAdapter
) -> AsyncGenerator[Deliveries, None]:
    """Yield the messages of a split, and verify after the last one that none is missing."""
    request, reader = split.range, OrderedReader(connection, split.range)
    gaps: SequenceGapTracker | None = None
    if split.required_from is not None:
        gaps = SequenceGapTracker(split.required_from, split.expiry_allowed_through)
    async with contextlib.aclosing(range_frames(reader)) as batches:
        async for frames in batches:
            if gaps is not None:
                gaps.add(frames.stream_seq)
            yield frames
    first_seq = reader.info.first_seq
    if gaps is not None and (missing := gaps.aged_out(first_seq, request.end)):
        jetstream = await connection.jetstream()
        await report_aged_out(adapter, jetstream, reader.info, *missing)
    await verify_left_out(reader, connection)


async def range_frames(reader: OrderedReader) -> AsyncGenerator[Deliveries, None]:
    """Yield the messages of a range.

    Raises:
        DataLossError: the stream was re-created or rolled back. Rows from before and after may be
            mixed, so only a new plan is correct, under any setting.
    """
    try:
        async with contextlib.aclosing(reader.batches()) as batches:
            async for frames in batches:
                yield frames
    except StreamChangedError as error:
        goes_on = "with the re-created stream"
        if error.identity is not Identity.RECREATED:
            goes_on = "after the last message that is left"
        raise DataLossError(
            f"data loss in stream {reader.request.stream}: the stream was {error.identity.value} "
            f"while the range {reader.request.bounds} was read: {error.observed}; load a batch "
            f"again, or restart a streaming query with failOnDataLoss=false to continue {goes_on}"
        ) from error


async def verify_left_out(reader: OrderedReader, connection: ReusableConnection) -> None:
    """Raise ProtocolError if messages were left out that the stream does not have."""
    request, messages, info = reader.request, reader.left_out, reader.info

    async def others() -> int | None:
        return await other_messages(await connection.jetstream(), info, request.prefix)

    if messages and await connection.retry_transient(others) == 0:
        raise ProtocolError(
            f"could not read stream {info.name!r}: {messages} messages of the range "
            f"{request.bounds} were received with subjects that do not start with "
            f"{request.prefix!r}, and the stream does not have such messages; a proxy may have "
            f"changed them: use TLS"
        )
