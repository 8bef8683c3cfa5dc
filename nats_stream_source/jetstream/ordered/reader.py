"""Reads a range of a stream in order, without a gap or a duplicate: asyncio around ``Intake``.

A range that is not small takes the subscribe workflow of an ordered consumer (ADR-15): subscribe to
a new inbox, create an ephemeral push consumer with flow control and idle heartbeats
(``consumer.py``), pass its frames to the intake (``wire/consumer/intake.py``), do what its events
require, delete the consumer. When a consumer is lost (a gap, missed heartbeats, a reconnect, …),
the next one starts after the last kept row. Initial values (``last_per_subject``) start again;
those behind a missing one are held back until it arrives.

Waiting. Messages and heartbeats arrive through an :class:`Inbox`. Only the time that is spent
waiting for it is counted: while Spark requests no rows, the event loop does not run and no timeout
elapses. If no frame arrives for three heartbeat intervals, a PING/PONG distinguishes a slow server
from a lost consumer: all frames that were sent before the PONG have arrived with it, and only then
the silence counts as missed heartbeats.

Unbounded ranges (``ENDLESS``) are the base of watches: an eager reader yields messages as they
arrive. While the caller requests no batch, frames wait in the inbox, flow control gets no reply,
and the server stops sending. Without flow control the inbox drops the excess frames, which the
cursor detects as a gap.

End. The reader ends when the cursor is done and the stream is verified to be the same, or with an
error: too many rebuilds without progress (ConsumerLostError), a replica that does not reach ``end``
(MinLastSequenceError), a re-created or rolled-back stream (StreamChangedError), no connection
(ConnectError). In every case it deletes the consumer, ends the subscription, and leaves no frame of
either on the connection.

Small ranges. A consumer takes a dozen milliseconds, on a bucket whose sequences are mostly gaps
several dozens (docs/internals/measurements.md, "Servers"), for any number of messages: most of the
time of a small micro-batch. A ``STREAM.MSG.GET`` for every sequence of the range, all in parallel
at the stream leader, takes one or two. A sequence that the leader does not have is a gap only if
the leader has reached the range's end: a leader that was just elected may not have. So its state is
requested before and after, and unless the same server responds both times and has the end, the
range is left to a consumer, which waits for it. A consumer also reads the range if a response is
missing, a permission is missing, or messages are so large that the responses would need much
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import nats.errors

from nats_stream_source.aio.tasks import gather_limited, run_to_completion
from nats_stream_source.connection.inbox import Inbox
from nats_stream_source.errors import (
    ConsumerLimitError,
    ConsumerLostError,
    MinLastSequenceError,
    NatsSourceError,
    PermissionDeniedError,
    ProtocolError,
    RequestTimeoutError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream, as_deliveries, max_concurrent_requests
from nats_stream_source.jetstream.ordered.consumer import EphemeralConsumer
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest, report_left_out
from nats_stream_source.jetstream.retry import Backoff, is_outage, is_transient
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_identity import (
    Identity,
    KnownStream,
    StreamChangedError,
    verify_created,
    verify_unchanged,
)
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import covers
from nats_stream_source.jetstream.times import rfc3339
from nats_stream_source.logs import field_logger
from nats_stream_source.metrics.table import REBUILDS, count
from nats_stream_source.wire.consumer.cursor import Rebuild, State
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.consumer.intake import Ignored, Intake, Reply, last_row
from nats_stream_source.wire.framing.frames import Frames

log = field_logger(__name__)

MAX_SEQUENCES = 32
"""Above, a consumer is cheaper than single requests (docs/internals/performance_method.md)."""

_MAX_MEAN_SIZE = 64 << 10  # bytes; above, a consumer reads a range of few sequences
_FLOW_CONTROL_DELAY = 0.05  # seconds that a reply is delayed near the end of a range
_MAX_UNBOUND = 2  # consumers whose deliver subject has no subscriber, after a lost one
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
        intake: what has been received.
        cursor: the progress of the read, and the reasons of the rebuilds.
    """

    def __init__(self, connections: ReusableConnection, request: RangeRequest) -> None:
        self.request = request
        self.intake = Intake(
            request.start,
            request.end,
            initial_through=request.target if request.last_per_subject else 0,
            prefix=request.prefix,
            batch_rows=request.batch_rows,
            batch_bytes=request.batch_bytes,
            eager=request.eager,
        )
        self.cursor = self.intake.cursor
        self._info: StreamInfo | None = None
        self._connections = connections
        self._consumer = EphemeralConsumer(connections, request)
        self._leader_changed = False
        self._away = False  # the last consumer was not created because servers are away
        self._seconds_without_progress = 0.0

    def __repr__(self) -> str:
        return f"<OrderedReader {self.request.stream} {self.cursor!r}>"

    @property
    def info(self) -> StreamInfo:
        """The stream after the last message of a range, as its leader reports it."""
        assert self._info is not None
        return self._info

    @property
    def left_out(self) -> int:
        """The number of messages that lacked ``request.prefix``."""
        return self.intake.left_out

    def leader_changed(self) -> None:
        """Replace the consumer by one at the present stream leader, after the next heartbeat."""
        self._leader_changed = True

    async def batches(self) -> AsyncGenerator[Deliveries, None]:
        """Yield the range's messages in order, without a gap or a duplicate, batch by batch.

        After each batch, ``self.cursor.seen_through`` is the last sequence that the server is known
        to have processed.

        Raises: see the module, and the errors of the consumer's creation.
        """
        request, cursor, intake = self.request, self.cursor, self.intake
        if is_small(request):
            rows = await self._connections.retry_transient(self._small_range)
            if rows is not None:
                yield rows
                return
        try:
            while not cursor.done:
                before = cursor.seen_through, cursor.consumer_seq
                received, reply = await self._receive()
                for event in intake.feed(received):
                    if isinstance(event, Reply):
                        await self._publish(event)
                    elif isinstance(event, Ignored):
                        log.warning(
                            "ignored a message that is neither a delivery nor a status",
                            stream=request.stream,
                        )
                    else:
                        yield event
                if reply is not None:
                    intake.confirmed(reply)
                if (cursor.seen_through, cursor.consumer_seq) != before:
                    self._seconds_without_progress = 0.0
        finally:
            report_left_out(request.stream, request.prefix, intake.left_out)
            await run_to_completion(self._consumer.close())
        for batch in intake.rest():
            yield batch
        await self._connections.retry_transient(self._verify_end)
        log.debug("range read", stream=request.stream, cursor=cursor)

    # -- the stream -----------------------------------------------------------------------------

    async def _small_range(self) -> Deliveries | None:
        """The messages of a small range, verified; None to use a consumer."""
        jetstream = await self._connections.jetstream()
        small = await small_range(jetstream, self.request)
        if small is None:
            return None
        rows, info = small
        self.intake.last_row = last_row(rows)
        await self._verify(jetstream, info, ended=True)
        return rows

    async def _verify_end(self) -> None:
        await self._verify(await self._connections.jetstream(), None, ended=True)

    async def _verify_rebuild(self) -> None:
        assert self._consumer.connection is not None
        await self._verify(JetStream(self._consumer.connection), None, ended=False)

    async def _verify(self, jetstream: JetStream, info: StreamInfo | None, *, ended: bool) -> None:
        """Verify that the stream is the one that was known when the range was chosen.

        While a range is read, the reader waits for a mirror that lags, for at most
        ``catch_up_timeout``.
        """
        info = info or await jetstream.stream_info(self.request.stream)
        request, known, row = self.request, self.request.known, self.intake.last_row
        endless = request.end == ENDLESS
        reached = max(known.seq, self.cursor.seen_through if endless else request.end)
        evidence = [KnownStream(known.created, reached)]
        if known.time is not None:
            evidence.append(known)
        kept = None if row is None else KnownStream(known.created, row[0], rfc3339(row[1]))
        if kept is not None and not ended:
            evidence.append(kept)
        lags = await verify_unchanged(jetstream, info, evidence, kept if ended else None)
        observed = f"the mirror's last sequence is {info.last_seq}, expected {reached} or later"
        if lags and ended:
            raise RequestTimeoutError(
                f"could not verify the read of stream {request.stream!r}: {observed}; retry once "
                f"it has caught up with its origin",
                settings=(),
            )
        if lags and endless:
            raise StreamChangedError(request.stream, Identity.ROLLED_BACK, evidence[0], observed)
        self._info = info

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
            # Not `retry`: a rebuild is a transition of the cursor, which counts the failures.
            await asyncio.sleep(_BACKOFF.pause(cursor.failed_rebuilds))
        # The cause of a rebuild may be a dead connection, so it is verified.
        verify = bool(cursor.rebuilds)
        if outage is None:
            await consumer.connect(verify=verify)
        else:
            await outage.retry(lambda: consumer.connect(verify=verify), ends=not self._away)
        try:
            if cursor.rebuilds:
                await self._verify_rebuild()
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
            self.intake.lost(Rebuild.NO_ANSWER, str(error))
            return
        if self._away and outage is not None:
            outage.end()
        self._away = False
        merged = consumer.merged_filter
        self.intake.created(None if merged is None else merged.select)

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
        request, cursor, consumer = self.request, self.cursor, self._consumer
        if consumer.connection is None or not cursor.rebuilds:
            return
        reason = cursor.rebuilds[-1]
        count(REBUILDS, request.stream, reason.value)
        log.warning(
            "consumer rebuilt",
            stream=request.stream,
            start=request.start,
            end="none" if request.end == ENDLESS else request.end,
            position=cursor.position,
            reason=reason.value,
            attempt=cursor.failed_rebuilds,
            consumer=consumer.name,
            detail=self.intake.loss,
        )
        if reason is Rebuild.STALLED:
            consumer.flow_control = False
            log.warning(
                "flow-control answers do not reach the server, so the next consumer does "
                "without: the user's permissions, or the account's import, lack '$JS.FC.>'",
                stream=request.stream,
            )
        await consumer.discard()

    async def _publish(self, reply: Reply) -> None:
        """Answer flow control."""
        connection = self._consumer.connection
        if connection is None:
            return
        # A closed connection is handled by the main loop.
        try:
            with contextlib.suppress(nats.errors.Error):
                await connection.publish(reply)
        except UnicodeEncodeError:
            raise ProtocolError(
                f"could not answer flow control: reply subject {reply!r} is not valid UTF-8"
            ) from None
        # Two turns of the event loop, in which the flusher of nats-py writes. If Spark pauses the
        # reader now, no loop runs, and a reply that remains in a buffer would stall the server.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    # -- waiting --------------------------------------------------------------------------------

    async def _receive(self) -> tuple[list[Frames], str | None]:
        """The next frames, if any; and a flow-control reply, if the server has it after them."""
        if self.cursor.state is State.IDLE:
            await self._discard_consumer()
            await self._create_consumer()
            return [], None
        if self._leader_changed:
            self._leader_changed = False
            self.intake.lost(Rebuild.LEADER_CHANGED)
            return [], None
        inbox = self._consumer.inbox
        assert inbox is not None
        if received := inbox.take():
            return received, None
        if self._consumer.connection_lost:
            self.intake.lost(Rebuild.RECONNECTED)
            return [], None
        return await self._wait(inbox)

    async def _wait(self, inbox: Inbox) -> tuple[list[Frames], str | None]:
        """Wait for frames; verify the connection and the replica's progress if none arrive."""
        request, cursor, intake = self.request, self.cursor, self.intake
        if cursor.defers_reply:
            arrived = await inbox.wait(_FLOW_CONTROL_DELAY)
            if not arrived and (reply := intake.idle()) is not None:
                await self._publish(reply)
            return [], None
        loop = asyncio.get_running_loop()
        started = loop.time()
        silent = not await inbox.wait(3 * request.heartbeat)
        if cursor.seen_through < request.target:
            self._seconds_without_progress += loop.time() - started
        received: tuple[list[Frames], str | None] = [], None
        if silent or (intake.stalled and cursor.unconfirmed_reply):
            received = await self._verify_consumer(inbox, silent)
        if not received[0] and self._seconds_without_progress > request.catch_up_timeout:
            await self._raise_replica_lag()
        return received

    async def _verify_consumer(self, inbox: Inbox, silent: bool) -> tuple[list[Frames], str | None]:
        """Send a PING: with its PONG, all frames that the server sent before have arrived."""
        reply = self.cursor.unconfirmed_reply
        if not await self._consumer.is_alive():
            self.intake.lost(Rebuild.RECONNECTED)
            await self._connections.drop()
            return [], None
        received = inbox.take()
        if silent and not received:
            self.intake.lost(Rebuild.MISSED_HEARTBEAT)
        return received, reply

    async def _raise_replica_lag(self) -> None:
        request, seen_through = self.request, self.cursor.seen_through
        await self._verify_rebuild()
        raise MinLastSequenceError(
            f"could not read stream {request.stream!r} up to sequence {request.target}: the "
            f"delivering replica or mirror has reached {seen_through} and made no progress for "
            f"{request.catch_up_timeout:g} s (412, 10180, min last sequence); retry once it has "
            f"caught up"
        )


def is_small(request: RangeRequest) -> bool:
    """Whether single requests to the leader may be cheaper than a consumer."""
    length = request.end - request.start
    return request.at_leader and not request.last_per_subject and 0 < length <= MAX_SEQUENCES


async def small_range(
    jetstream: JetStream, request: RangeRequest
) -> tuple[Deliveries, StreamInfo] | None:
    """The messages of a small range as a consumer would deliver them; None to use a consumer.

    The second element is the stream's state after the read.
    """
    if request.end - request.start > max_concurrent_requests(jetstream):
        return None
    try:
        return await _read_small_range(jetstream, request)
    except NatsSourceError as error:
        if not (
            is_transient(error) or isinstance(error, PermissionDeniedError | StreamNotFoundError)
        ):
            raise
        # The consumer raises the error if it persists.
        level = log.warning if isinstance(error, PermissionDeniedError) else log.info
        level("a small range is read by a consumer", stream=request.stream, error=error)
    return None


async def _read_small_range(
    jetstream: JetStream, request: RangeRequest
) -> tuple[Deliveries, StreamInfo] | None:
    stream, end = request.stream, request.end
    before = await jetstream.stream_info(stream)
    verify_created(request.known, before)
    if before.last_seq < end or before.nbytes > _MAX_MEAN_SIZE * before.messages:
        return None
    responses = await gather_limited(
        lambda seq: jetstream.message(stream, seq=seq), range(request.start + 1, end + 1)
    )
    messages = [message for message in responses if message is not None]
    after = await jetstream.stream_info(stream)
    verify_created(request.known, after)
    if not before.is_same_leader(after, end):
        log.info("a small range is read by a consumer", stream=stream, error="the leader changed")
        return None
    if any("\ufffd" in message.subject for message in messages):
        return None  # possibly the server's replacement of bytes that are not UTF-8
    filters = request.filters
    if not filters and not all(one.subject.startswith(request.prefix) for one in messages):
        return None  # the verification of what is left out compares a consumer's deliveries
    matching = [
        message
        for message in messages
        if not filters or any(covers(f, message.subject) for f in filters)
    ]
    return as_deliveries(stream, matching, headers_only=request.headers_only), after
