"""Losses that a read of a split detects: the stream changed, subjects forged.

*The stream changed.* If it was re-created or rolled back while it was read, the received rows are
not those that the offsets promise, and the task fails. The ordered reader detects it
(``jetstream/ordered/reader.py``); :func:`range_frames` words its error.

*Subjects forged.* The reader leaves out messages of other subjects where a stream may have them
(``RangeRequest.prefix``), so the stream must have such messages.

Messages that aged out: :mod:`nats_stream_source.rows.sequence_gaps`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

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
