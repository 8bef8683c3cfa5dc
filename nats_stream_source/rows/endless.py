"""The messages of a bucket or stream from a position on, as they arrive, without an end.

One ordered consumer reads them. With ``at_leader`` the stream leader serves it: another replica may
lag, or lack messages. A consumer outlives the leadership of its server, so the owner passes the
stream info that it requests from time to time to :meth:`EndlessRead.update`, and the reader
replaces the consumer by one at the new leader, as after any other loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

import pyarrow as pa

from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.rows.base import FormatAdapter, Split
from nats_stream_source.wire.consumer.deliveries import Deliveries


class EndlessRead:
    """Reads the messages after ``start``.

    Args:
        info: the stream as its leader reports it.
        start: a sequence; messages after it are read.
        initial_through: messages up to this sequence are initial values.
        last_per_subject: whether they are the last message of each subject only; ``start`` is 0.
        at_leader: whether only the stream leader serves the consumer.
        accumulate: see :class:`RangeRequest`.
        max_rows, max_bytes: of what is yielded at once; None for the reader's own limits.

    Attributes:
        position: the last sequence that was yielded; ``start`` before the first one.
    """

    def __init__(
        self,
        adapter: FormatAdapter,
        connection: ReusableConnection,
        info: StreamInfo,
        start: int,
        *,
        initial_through: int = 0,
        last_per_subject: bool = False,
        at_leader: bool = False,
        accumulate: bool = False,
        max_rows: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        request = adapter.range_request(
            adapter.read_scope(info), info, start, ENDLESS, last_per_subject=last_per_subject
        )
        self._adapter = adapter
        self._split = Split(request, initial_through)
        self.position = start
        self._leader = info.leader if at_leader else None
        minimum = initial_through if initial_through > start else None
        eager = replace(
            request,
            eager=True,
            at_leader=at_leader,
            accumulate=accumulate,
            min_last_seq=minimum,
            batch_rows=min(request.batch_rows, max_rows or request.batch_rows),
            batch_bytes=min(request.batch_bytes, max_bytes or request.batch_bytes),
        )
        self._reader = OrderedReader(connection, eager)

    @property
    def through(self) -> int:
        """The sequence up to which all messages were yielded."""
        cursor = self._reader.cursor
        # The cursor may be ahead: the reader yields the kept messages batch by batch.
        return cursor.seen_through if cursor.position <= self.position else self.position

    @property
    def complete(self) -> bool:
        """Whether all initial values were yielded."""
        return self.through >= self._split.initial_through

    def update(self, info: StreamInfo) -> None:
        """Move the read to the stream leader, if ``info`` shows another one."""
        if self._leader is not None and info.leader not in (None, self._leader):
            self._leader = info.leader
            self._reader.leader_changed()

    async def batches(self) -> AsyncGenerator[Deliveries, None]:
        """Yield messages as they arrive; raises as :meth:`OrderedReader.batches`."""
        async with contextlib.aclosing(self._reader.batches()) as batches:
            async for messages in batches:
                if len(messages):
                    self.position = int(messages.stream_seq[-1])
                    yield messages

    def rows(self, messages: Deliveries) -> pa.RecordBatch:
        """The rows of messages, without those that the options leave out."""
        return self._adapter.record_batch(messages, self._split)
