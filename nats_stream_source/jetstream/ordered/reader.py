"""An ordered consumer over one range, or an unbounded one: asyncio around ``wire.consumer.cursor``.

The subscribe workflow of an ordered consumer (ADR-15), for every range: subscribe to a new inbox,
create an ephemeral push consumer with flow control and idle heartbeats (``consumer``), pass every
frame to the cursor, do what it returns, delete the consumer. When the cursor abandons a consumer
(a gap, missed heartbeats, a reconnect, …), the next one starts after the last kept row. Initial
values (``last_per_subject``) start again; those behind a missing one are held back until it
arrives, up to ``_MAX_HELD_BYTES``.

Waiting. Messages and heartbeats arrive through an :class:`Inbox`. Only the time that is spent
waiting for it is counted: while Spark requests no rows, the event loop does not run and no timeout
elapses. If no frame arrives for three heartbeat intervals, a PING/PONG distinguishes a slow server
from a lost consumer: all frames that were sent before the PONG have arrived with it, and only then
the silence counts as missed heartbeats.

Unbounded ranges (``ENDLESS``) are the base of watches: an eager reader yields messages as they
arrive. While the caller requests no batch, frames wait in the inbox, flow control gets no reply,
and the server stops sending. Without flow control the inbox drops the excess frames, which the
cursor detects as a gap.

End. The reader ends when the cursor is done, or with an error: too many rebuilds without progress
(ConsumerLostError), a replica that does not reach ``end`` (MinLastSequenceError), a re-created or
rolled-back stream (DataLossError), no connection (ConnectError). In every case it deletes the
consumer, ends the subscription, and leaves no frame of either on the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator

import nats.errors
import numpy as np
from numpy.typing import NDArray

from nats_stream_source.aio.retry import Backoff, is_outage, is_transient
from nats_stream_source.aio.tasks import run_to_completion
from nats_stream_source.connection.inbox import Inbox
from nats_stream_source.errors import (
    ConsumerLimitError,
    ConsumerLostError,
    MinLastSequenceError,
    NatsSourceError,
    ProtocolError,
)
from nats_stream_source.jetstream.ordered.consumer import EphemeralConsumer
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest, report_left_out
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.logs import field_logger
from nats_stream_source.metrics.counts import count
from nats_stream_source.metrics.table import REBUILDS
from nats_stream_source.wire.columns import within
from nats_stream_source.wire.consumer.ack_subject import ack_tokens, other_frames, with_acks
from nats_stream_source.wire.consumer.batches import FrameBatcher
from nats_stream_source.wire.consumer.cursor import Cursor, CursorAction, Rebuild, State
from nats_stream_source.wire.consumer.last_per_subject import HeldRows
from nats_stream_source.wire.consumer.status import ConsumerStatus
from nats_stream_source.wire.framing.frames import Frames
from nats_stream_source.wire.headers import parse_headers

log = field_logger(__name__)

_FLOW_CONTROL_DELAY = 0.05  # seconds that a reply is delayed near the end of a range
_MAX_UNBOUND = 2  # consumers whose deliver subject has no subscriber, after a lost one
_MAX_HELD_BYTES = 64 << 20  # of the initial values behind a missing one
_BACKOFF = Backoff(0.02, 2.0)  # before a rebuild that follows rebuilds without progress

_ADVICE = {
    Rebuild.NO_ANSWER: (
        "request_timeout",
        "if the server responds slowly, increase 'request_timeout'",
    ),
    Rebuild.MISSED_HEARTBEAT: (
        "inbox_prefix",
        "if the consumer never delivers, its deliver subject does not lead to this client: set "
        "'inbox_prefix' to a prefix that the user may subscribe to and, in an account with "
        "imports, that is imported",
    ),
}


class OrderedReader:
    """Reads one range.

    Attributes:
        request: the range.
        cursor: the progress of the read, and the reasons of the rebuilds.
        left_out: the number of messages that lacked ``request.prefix``.
    """

    def __init__(self, connections: ReusableConnection, request: RangeRequest) -> None:
        self.request = request
        initial_through = request.target if request.last_per_subject else 0
        self.cursor = Cursor(request.start, request.end, initial_through)
        self._connections = connections
        self._consumer = EphemeralConsumer(connections, request)
        self._batcher = FrameBatcher(request.batch_rows, request.batch_bytes)
        self._held = HeldRows()
        started = request.start_time
        self._last = None if started is None else (request.start, started)  # kept, and its time
        self.left_out = 0
        self._stalled = False
        self._rebuild_detail = ""
        self._away = False  # the last consumer was not created because servers are away
        self._seconds_without_progress = 0.0

    def __repr__(self) -> str:
        return f"<OrderedReader {self.request.stream} {self.cursor!r}>"

    async def batches(self) -> AsyncGenerator[Frames, None]:
        """Yield the range's messages in order, without a gap or a duplicate, batch by batch.

        After each batch, ``self.cursor.seen_through`` is the last sequence that the server is known
        to have processed.

        Raises:
            ConsumerLostError: more than ``request.attempts`` consumers in a row were lost, or
                fewer where the server has no subscriber of their deliver subjects.
            MinLastSequenceError: the replica made no progress for ``request.catch_up_timeout``
                seconds.
            DataLossError: the stream was re-created or rolled back.
            ConnectError: not connected.
            ConsumerLimitError, StreamNotFoundError, …: as :meth:`EphemeralConsumer.create`.
        """
        cursor, request = self.cursor, self.request
        announced = not request.eager
        try:
            while not cursor.done:
                if cursor.state is State.IDLE:
                    await self._discard_consumer()
                    await self._create_consumer()
                elif received := self._take_received():
                    await self._process(received)
                elif self._consumer.connection_lost:
                    cursor.lost(Rebuild.RECONNECTED)
                else:
                    await self._wait()
                while (batch := self._next_batch()) is not None:
                    announced = announced or cursor.seen_through >= request.target
                    yield batch
                if not announced and cursor.seen_through >= request.target:
                    announced = True
                    yield Frames.join([])
        finally:
            report_left_out(request.stream, request.prefix, self.left_out)
            await run_to_completion(self._consumer.close())
        while (batch := self._batcher.pop()) is not None:
            yield batch
        log.debug("range read", stream=request.stream, cursor=cursor)

    def _next_batch(self) -> Frames | None:
        return self._batcher.pop() if self.request.eager else self._batcher.pop_full()

    # -- the consumer ---------------------------------------------------------------------------

    async def _create_consumer(self) -> None:
        """Make one attempt to create a consumer that delivers from the cursor's position on."""
        cursor, request, consumer = self.cursor, self.request, self._consumer
        outage = self._connections.outage
        unreachable = cursor.failed_rebuilds > consumer.unbound >= _MAX_UNBOUND
        # While servers are away, the outage's timeout counts instead of the attempts.
        if (cursor.failed_rebuilds > request.attempts and not self._away) or unreachable:
            raise self._consumer_lost_error()
        if cursor.failed_rebuilds > 1:
            # Not aio.retry: a rebuild is a transition of the cursor, which counts the failures.
            await asyncio.sleep(_BACKOFF.pause(cursor.failed_rebuilds))
        # The cause of a rebuild may be a dead connection, so it is verified.
        verify = bool(cursor.rebuilds)
        if outage is None:
            await consumer.connect(verify=verify)
        else:
            await outage.retry(lambda: consumer.connect(verify=verify), ends=not self._away)
        self._stalled = False
        try:
            if cursor.rebuilds:
                await consumer.verify_stream(cursor.seen_through, self._last)
            await consumer.create(
                cursor.position, cursor.seen_through, failures=cursor.failed_rebuilds
            )
        except (NatsSourceError, nats.errors.Error) as error:
            if isinstance(error, NatsSourceError) and not is_transient(error):
                raise
            if isinstance(error, ConsumerLimitError) and cursor.failed_rebuilds >= request.attempts:
                raise  # its message names the setting to change
            # Transient while a server starts or the stream elects a leader.
            if outage is not None and is_outage(error):
                await outage.wait(error)
                self._away = True
            self._abandon_consumer(Rebuild.NO_ANSWER, str(error))
            return
        if self._away and outage is not None:
            outage.end()
        self._away = False
        cursor.created()

    def _consumer_lost_error(self) -> ConsumerLostError:
        cursor = self.cursor
        reasons = cursor.rebuilds[-cursor.failed_rebuilds :]
        listed = ", ".join(reason.value for reason in reasons)
        advice = [entry for reason, entry in _ADVICE.items() if reason in reasons]
        return ConsumerLostError(
            f"could not read stream {self.request.stream!r} after sequence {cursor.position}: "
            f"{cursor.failed_rebuilds} consumers in a row were lost without progress ({listed})"
            + "".join(f"; {text}" for _, text in advice),
            settings=[setting for setting, _ in advice],
        )

    async def _discard_consumer(self) -> None:
        """Delete the consumer that the cursor has abandoned, if any."""
        consumer = self._consumer
        if consumer.connection is None or not self.cursor.rebuilds:
            return
        reason = self.cursor.rebuilds[-1]
        self._log_rebuild(reason)
        if reason is Rebuild.STALLED:
            consumer.flow_control = False
            log.warning(
                "flow-control answers do not reach the server, so the next consumer does "
                "without: the user's permissions, or the account's import, lack '$JS.FC.>'",
                stream=self.request.stream,
            )
        await consumer.discard()

    def _abandon_consumer(self, reason: Rebuild, detail: str) -> None:
        """Abandon the consumer; the log line of the rebuild contains ``detail``."""
        self._rebuild_detail = detail
        self.cursor.lost(reason)

    def _log_rebuild(self, reason: Rebuild) -> None:
        """Log and count a rebuild."""
        request, cursor = self.request, self.cursor
        count(REBUILDS, request.stream, reason.value)
        log.warning(
            "consumer rebuilt",
            stream=request.stream,
            start=request.start,
            end="none" if request.end == ENDLESS else request.end,
            position=cursor.position,
            reason=reason.value,
            attempt=cursor.failed_rebuilds,
            consumer=self._consumer.name,
            detail=self._rebuild_detail,
        )
        self._rebuild_detail = ""

    # -- frames ---------------------------------------------------------------------------------

    def _take_received(self) -> list[Frames]:
        inbox = self._consumer.inbox
        return inbox.take() if inbox is not None else []

    async def _process(self, received: list[Frames]) -> None:
        cursor = self.cursor
        before = cursor.seen_through, cursor.consumer_seq
        for frames in received:
            begin = 0
            for status in other_frames(frames):
                self._process_deliveries(frames.select(slice(begin, status)))
                await self._process_status(frames, status)
                begin = status + 1
            self._process_deliveries(frames.select(slice(begin, len(frames))) if begin else frames)
        if (cursor.seen_through, cursor.consumer_seq) != before:
            self._seconds_without_progress = 0.0

    def _process_deliveries(self, frames: Frames) -> None:
        if not len(frames):
            return
        frames = with_acks(frames)  # the caller of ``batches`` gets the parsed ACK subjects too
        tokens = ack_tokens(frames)
        boundaries: list[int] = []
        if self.request.last_per_subject and not frames.in_sequence:
            seqs = tokens.stream_seq
            ends = (np.diff(seqs) <= 0) | (np.diff(tokens.consumer_seq) != 1)
            boundaries = (np.flatnonzero(ends) + 1).tolist()
        for begin, end in itertools.pairwise((0, *boundaries, len(frames))):
            step = self.cursor.deliver(
                tokens.consumer_seq[begin:end],
                tokens.stream_seq[begin:end],
                in_sequence=frames.in_sequence,
            )
            if step.stop > step.first:
                rows = slice(begin + step.first, begin + step.stop)
                last = begin + step.stop - 1
                self._last = int(tokens.stream_seq[last]), int(tokens.timestamp_ns[last])
                self._keep(frames.select(rows), tokens.stream_seq[rows], step.rows)

    def _keep(
        self, frames: Frames, stream_seq: NDArray[np.int64], rows: NDArray[np.bool_] | None
    ) -> None:
        """Pass kept rows on; hold back initial values behind a missing one."""
        if rows is not None and not rows.all():
            frames, stream_seq = frames.select(rows), stream_seq[rows]
        if self._consumer.merged_filter is not None:
            # Before rows are held back: the next consumer may have another filter.
            frames = self._consumer.merged_filter.select(frames)
            stream_seq = ack_tokens(frames).stream_seq
        elif self.request.prefix:
            kept = within(frames, self.request.prefix)
            if kept is not frames:
                self.left_out += len(frames) - len(kept)
                frames, stream_seq = kept, ack_tokens(kept).stream_seq
        position = self.cursor.position
        if len(self._held) or (stream_seq.size and stream_seq[-1] > position):
            added = len(frames)
            self._held.add(frames, stream_seq)
            frames = self._held.release(position)
            if added and self._held.nbytes > _MAX_HELD_BYTES and self.cursor.reads_initial_values:
                self._abandon_consumer(Rebuild.GAP, "too many rows follow a missing row")
        if len(frames):
            self._batcher.add(frames)

    async def _process_status(self, frames: Frames, index: int) -> None:
        """Process a frame that is not a delivery: a status message of the consumer (ADR-15)."""
        headers = parse_headers(frames.header(index)) if len(frames.header(index)) else None
        status = headers.status if headers else None
        if headers is None or status is None:
            log.warning(
                "ignored a message that is neither a delivery nor a status",
                stream=self.request.stream,
            )
            return
        if status != 100:
            detail = f"{status} {headers.description}".strip()
            self._abandon_consumer(Rebuild.CONSUMER_GONE, detail)
            return
        reply = frames.reply(index).decode("utf-8", "surrogateescape")
        consumer_status = ConsumerStatus.from_headers(headers, reply)
        if consumer_status.reply is not None:
            await self._reply_to_flow_control(self.cursor.flow_control(consumer_status.reply))
            return
        last_consumer, last_stream = consumer_status.last_consumer, consumer_status.last_stream
        if last_consumer is None or last_stream is None:
            self._abandon_consumer(Rebuild.GAP, "a heartbeat without its sequences")
            return
        self._stalled = consumer_status.stalled is not None
        step = self.cursor.heartbeat(last_consumer, last_stream, consumer_status.stalled)
        await self._reply_to_flow_control(step)

    async def _reply_to_flow_control(self, step: CursorAction) -> None:
        connection = self._consumer.connection
        if step.reply is None or connection is None:
            return
        # A closed connection is handled by the main loop.
        try:
            with contextlib.suppress(nats.errors.Error):
                await connection.publish(step.reply)
        except UnicodeEncodeError:
            raise ProtocolError(
                f"could not answer flow control: reply subject {step.reply!r} is not valid UTF-8"
            ) from None
        # Two turns of the event loop, in which the flusher of nats-py writes. If Spark pauses the
        # reader now, no loop runs, and a reply that remains in a buffer would stall the server.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    # -- waiting --------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Wait for frames; verify the connection and the replica's progress if none arrive."""
        inbox = self._consumer.inbox
        assert inbox is not None
        loop = asyncio.get_running_loop()
        if self.cursor.defers_reply:
            if not await inbox.wait(_FLOW_CONTROL_DELAY):
                await self._reply_to_flow_control(self.cursor.idle())
            return
        started = loop.time()
        silent = not await inbox.wait(3 * self.request.heartbeat)
        if self.cursor.seen_through < self.request.target:
            self._seconds_without_progress += loop.time() - started
        if silent or (self._stalled and self.cursor.unconfirmed_reply):
            await self._verify_consumer(inbox, silent)
        if self._seconds_without_progress > self.request.catch_up_timeout:
            await self._raise_replica_lag()

    async def _verify_consumer(self, inbox: Inbox, silent: bool) -> None:
        """Send a PING: with its PONG, all frames that the server sent before have arrived."""
        reply = self.cursor.unconfirmed_reply
        if not await self._consumer.is_alive():
            self.cursor.lost(Rebuild.RECONNECTED)
            await self._consumer.drop_connection()
            return
        received = inbox.take()
        await self._process(received)
        if reply is not None:
            self.cursor.confirmed(reply)
        if silent and not received:
            self.cursor.lost(Rebuild.MISSED_HEARTBEAT)

    async def _raise_replica_lag(self) -> None:
        request, seen_through = self.request, self.cursor.seen_through
        await self._consumer.verify_stream(seen_through, self._last)
        raise MinLastSequenceError(
            f"could not read stream {request.stream!r} up to sequence {request.target}: the "
            f"delivering replica or mirror has reached {seen_through} and made no progress for "
            f"{request.catch_up_timeout:g} s (412, 10180, min last sequence); retry once it has "
            f"caught up"
        )
