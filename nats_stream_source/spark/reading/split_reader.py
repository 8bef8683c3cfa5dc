"""The reader of a task's splits: runs on an executor, once per attempt of the task.

It reads each planned range with an ordered consumer and yields record batches; a range of a few
sequences is read with single requests where that is cheaper (``spark.reading.small_range``). After
the last message it verifies that the stream is still the planned one
(``spark.reading.read_verifier``).

A task of a query of several streams has many small splits. Their rows are yielded one split after
the other, and meanwhile the next ones begin, up to the first batch of each: the requests of several
splits share a round trip, and the server prepares the next range while this one is converted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence

import pyarrow as pa

from nats_stream_source.errors import StreamNotFoundError
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.metrics.counts import count
from nats_stream_source.metrics.table import INPUT_BYTES
from nats_stream_source.spark.data_loss_report import report_data_loss
from nats_stream_source.spark.formats.base import FormatAdapter
from nats_stream_source.spark.formats.splits import Split
from nats_stream_source.spark.reading.read_verifier import (
    ReadVerifier,
    verified_stream_info,
    verify_created,
    verify_left_out,
)
from nats_stream_source.spark.reading.small_range import small_range
from nats_stream_source.spark.runner import Runner, cached_runner
from nats_stream_source.wire.framing.frames import Frames

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

    Raises:
        DataLossError: the stream was re-created or rolled back; or messages of the range aged out
            before they were read, and ``failOnDataLoss`` is set.
        ConsumerLostError, MinLastSequenceError, ConnectError, …: see ``jetstream.ordered.reader``.
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
) -> AsyncGenerator[tuple[Split, Frames], None]:
    """Yield the messages of splits, one after the other; read the next ones meanwhile."""
    waiting = deque(splits)
    opened: deque[_OpenSplit] = deque()
    try:
        while waiting or opened:
            while waiting and len(opened) < _AHEAD and (not opened or _is_small(waiting[0])):
                opened.append(_OpenSplit(connection, waiting.popleft(), adapter))
            head = opened[0]
            try:
                while (frames := await head.next()) is not None:
                    yield head.split, frames
            except StreamNotFoundError as error:
                _report_deleted(head.split, adapter, error)
            await opened.popleft().close()
    finally:
        await asyncio.gather(*(one.close() for one in opened))


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


def _is_small(split: Split) -> bool:
    return split.range.end - split.range.start <= _MAX_AHEAD_SEQUENCES


class _OpenSplit:
    """A split whose first messages are being read."""

    def __init__(
        self, connection: ReusableConnection, split: Split, adapter: FormatAdapter
    ) -> None:
        self.split = split
        self._frames = _split_frames(connection, split, adapter)
        self._first: asyncio.Task[Frames | None] | None = asyncio.ensure_future(self._next())

    async def next(self) -> Frames | None:
        """The next messages; None after the last ones."""
        first, self._first = self._first, None
        return await (first or self._next())

    async def _next(self) -> Frames | None:
        return await anext(self._frames, None)

    async def close(self) -> None:
        """End the read, whether it is complete or not."""
        if self._first is not None:
            self._first.cancel()
            # Whatever it found belongs to a read that ends for another reason.
            await asyncio.gather(self._first, return_exceptions=True)
        await self._frames.aclose()


async def _split_frames(
    connection: ReusableConnection, split: Split, adapter: FormatAdapter
) -> AsyncGenerator[Frames, None]:
    """Yield the messages of a split, and verify them after the last one."""
    verifier = ReadVerifier(split)

    async def read_small() -> tuple[Frames, StreamInfo] | None:
        return await small_range(await connection.jetstream(), split)

    if (small := await connection.retry_transient(read_small)) is not None:
        frames, info = small
        verify_created(info, split)
        verifier.add(frames)
        await verifier.verify(info, connection, adapter)
        yield frames
        return
    reader = OrderedReader(connection, split.range)
    async with contextlib.aclosing(reader.batches()) as batches:
        async for frames in batches:
            verifier.add(frames)
            yield frames
    info = await verified_stream_info(connection, split, adapter)
    await verifier.verify(info, connection, adapter)
    await verify_left_out(info, split, connection, reader.left_out)


def read_range(runner: Runner, request: RangeRequest) -> Generator[Frames, None, None]:
    """Yield the messages of a range; the caller verifies them."""
    return runner.iterate(OrderedReader(runner.connection, request).batches())
