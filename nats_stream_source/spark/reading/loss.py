"""Losses that a read of a split detects: the stream changed, messages aged out, subjects forged.

*The stream changed.* If it was re-created or rolled back while it was read, the received rows are
not those that the offsets promise, and the task fails. The ordered reader detects it
(``jetstream/ordered/reader.py``); :func:`range_frames` words its error.

*Messages aged out.* A stream with a limit removes its oldest messages continuously, also while a
range is read. A first sequence that has advanced meanwhile is not a loss: the removed messages may
have been read before. So :class:`SequenceGapTracker` records the sequences that were not received.
Those below the stream's present first sequence either aged out unread, or were a gap that a deleted
message had left; the two cannot be distinguished afterwards. At the start of a query the history is
accepted as it is: messages removed before its first message are not a loss.

*Subjects forged.* The reader leaves out messages of other subjects where a stream may have them
(``RangeRequest.prefix``), so the stream must have such messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.errors import (
    ConsumerLimitError,
    DataLossError,
    PermissionDeniedError,
    ProtocolError,
)
from nats_stream_source.jetstream.kv.other_messages import count_entries
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_identity import Identity, StreamChangedError
from nats_stream_source.wire.consumer.deliveries import Deliveries

_MAX_GAPS = 100_000  # above, gaps are merged into one; their number of sequences stays exact


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

    async def other_messages() -> int:
        try:
            jetstream = await connection.jetstream()
            return (await count_entries(jetstream, info, request.prefix))[1]
        except (PermissionDeniedError, ConsumerLimitError):
            return messages

    if messages and not await connection.retry_transient(other_messages):
        raise ProtocolError(
            f"could not read stream {info.name!r}: {messages} messages of the range "
            f"{request.bounds} were received with subjects that do not start with "
            f"{request.prefix!r}, and the stream does not have such messages; a proxy may have "
            f"changed them: use TLS"
        )


class SequenceGapTracker:
    """Tracks the sequences that a reader receives, in increasing order.

    Args:
        first: the first required sequence.
        expiry_allowed_through: messages up to here may be missing before the first received one.
    """

    def __init__(self, first: int, expiry_allowed_through: int = 0) -> None:
        self._next = first
        self._expiry_allowed_through = expiry_allowed_through
        self._gaps: list[NDArray[np.int64]] = []  # rows of (first, last, number of sequences)
        self._gap_count = 0

    @property
    def has_gaps(self) -> bool:
        """Whether a sequence before a received one was not received."""
        return self._gap_count > 0

    def add(self, sequences: NDArray[np.int64]) -> None:
        """Record the next sequences: increasing, and higher than all recorded ones."""
        ahead = sequences[np.searchsorted(sequences, self._next) :]
        if not len(ahead):
            return
        self._next = max(self._next, min(int(ahead[0]), self._expiry_allowed_through + 1))
        self._expiry_allowed_through = 0
        last = int(ahead[-1])
        if last - self._next == len(ahead) - 1:  # increasing, so nothing is missing
            self._next = last + 1
            return
        before = np.concatenate(([self._next - 1], ahead[:-1]))
        holes = np.flatnonzero(ahead - before > 1)
        if len(holes):
            begin, end = before[holes] + 1, ahead[holes] - 1
            self._record(np.column_stack((begin, end, end - begin + 1)))
        self._next = last + 1

    def _record(self, gaps: NDArray[np.int64]) -> None:
        self._gaps.append(gaps)
        self._gap_count += len(gaps)
        if self._gap_count > _MAX_GAPS:
            every = np.concatenate(self._gaps)
            self._gaps = [np.array([[every[0, 0], every[-1, 1], every[:, 2].sum()]])]
            self._gap_count = 1

    def aged_out(self, first_seq: int, end: int) -> tuple[int, int, int] | None:
        """The sequences up to ``end`` that were not received and are not available; None if none.

        Args:
            first_seq: the stream's present first sequence.

        Returns:
            The first and the last of these sequences, and their number.
        """
        last_removed = min(first_seq - 1, end)
        rest = max(self._next, self._expiry_allowed_through + 1)
        gaps = np.concatenate((*self._gaps, [[rest, last_removed, last_removed - rest + 1]]))
        gaps = gaps[gaps[:, 0] <= last_removed]
        if not len(gaps):
            return None
        last = min(int(gaps[-1, 1]), last_removed)
        gaps[-1, 2] = min(gaps[-1, 2], last - gaps[-1, 0] + 1)
        return int(gaps[0, 0]), last, int(gaps[:, 2].sum())
