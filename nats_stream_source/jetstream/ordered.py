"""An ordered consumer over one range, or without an end: the async shell around ``wire.cursor``.

The subscribe workflow (ADR-15), run anew for every range: subscribe to a fresh inbox, create an
ephemeral push consumer with flow control and idle heartbeats, feed every frame to the cursor, do
what it says, delete the consumer. Whenever the cursor gives a consumer up (a gap, missed
heartbeats, a reconnect, …) the next one starts after the last kept row. Frames of an earlier
consumer cannot be mixed up: each consumer has an inbox of its own.

How it waits. Messages and heartbeats arrive through an :class:`Inbox`. Only the time spent waiting
for it is counted; while Spark does not ask for more, no event loop runs and no clock ticks. When
nothing came for three heartbeat intervals, a PING/PONG tells a slow server from a lost consumer:
what was sent before the PONG has arrived with it, and only then silence is judged.

Without an end (``ENDLESS``) it is what watches stand on: an eager reader yields what has arrived at
once. While nobody asks for more, frames wait in the inbox, flow control goes unanswered, and the
server waits; were there no flow control, the inbox would drop what is too much, which the cursor
sees as a gap.

How it ends. Either the cursor is done, or an error is raised: too many rebuilds without progress
(ConsumerLostError), a replica that does not reach ``end`` (MinLastSequenceError), a stream that is
not the planned one any more (DataLossError), no server (ConnectError). In every case the consumer
is deleted and the subscription ended, and a PING/PONG makes sure that nothing of it is still under
way on the connection; where that fails, the connection is closed. A consumer that cannot be deleted
is removed by the server, since nobody listens any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import nats.errors
import numpy as np

from nats_stream_source.errors import (
    ConsumerLimitError,
    ConsumerLostError,
    ConsumerNotFoundError,
    DataLossError,
    MinLastSequenceError,
    NatsSourceError,
    PermissionDeniedError,
    ProtocolError,
    RequestTimeoutError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.bridge import Inbox
from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.consumer_config import ConsumerInfo
from nats_stream_source.jetstream.finishing import finish
from nats_stream_source.jetstream.less import check_less
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.one_filter import OneFilter, loses_messages
from nats_stream_source.jetstream.patience import passes
from nats_stream_source.jetstream.range_request import (
    ENDLESS,
    RangeRequest,
    consumer_config,
)
from nats_stream_source.jetstream.within import within
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.batches import Batcher
from nats_stream_source.wire.columns import ack_tokens, is_delivery, with_acks
from nats_stream_source.wire.cursor import Cursor, Rebuild, State, Step
from nats_stream_source.wire.frames import Frames
from nats_stream_source.wire.headers import parse_headers
from nats_stream_source.wire.status import Status

log = field_logger(__name__)

_PONG_DEADLINE = 2.0  # seconds; a server that does not answer for so long is taken for lost
_SLOW_PONG = 60.0  # unless something comes: on a slow line all that is under way stands before it
_HELD_BACK = 0.05  # seconds that an answer to flow control is held back near the end of a range
_FIRST_PAUSE = 0.02  # seconds before a rebuild that follows a fruitless one; doubles up to …
_LONGEST_PAUSE = 2.0
_MOST_PLACES = 30  # consumers until the leader is given one; servers place them at random
_MOST_ORPHANS = 16  # the server removes them by itself within a minute

_ADVICE = {
    Rebuild.NO_ANSWER: "A server that is slow to answer needs a larger option 'requestTimeout'",
    Rebuild.MISSED_HEARTBEAT: (
        "A consumer that is heard of never delivers to a subject that does not lead here: the "
        "option 'inboxPrefix' must be one that the user may subscribe to, and in an account of "
        "imports one that is imported"
    ),
}


class OrderedReader:
    """Reads one range. ``cursor`` shows how far it is and why consumers were rebuilt."""

    def __init__(self, link: Link, request: RangeRequest) -> None:
        self.request = request
        listed = request.target if request.last_per_subject else 0
        self.cursor = Cursor(request.start, request.end, listed)
        self._link = link
        self._name = f"{link.settings.consumer_prefix}-{uuid.uuid4().hex[:16]}"
        self._serial = 0
        self._orphans: list[str] = []
        self._connection: Connection | None = None
        self._inbox: Inbox | None = None
        self._reconnects = 0
        self._flow_control = True
        self._stalled = False
        self._detail = ""
        self._waited = 0.0
        self._kept = Batcher(request.batch_rows, request.batch_bytes)
        self._one: OneFilter | None = None

    def __repr__(self) -> str:
        return f"<OrderedReader {self.request.stream} {self.cursor!r}>"

    async def batches(self) -> AsyncGenerator[Frames, None]:
        """Yield the range's messages in order, without a gap or a duplicate, batch by batch.

        ``self.cursor`` tells after each batch how far the server is known to have looked
        (``seen_through``).
        """
        cursor, request = self.cursor, self.request
        announced = not request.eager
        try:
            while not cursor.done:
                if cursor.state is State.IDLE:
                    await self._retire()
                    await self._build()
                elif arrived := self._take():
                    await self._feed(arrived)
                elif self._lost_connection():
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
            await finish(self._leave())
        while (batch := self._kept.rest()) is not None:
            yield batch
        log.debug("range read", stream=request.stream, cursor=cursor)

    def _next_batch(self) -> Frames | None:
        return self._kept.rest() if self.request.eager else self._kept.full()

    # -- the consumer ---------------------------------------------------------------------------

    @property
    def _consumer(self) -> str:
        return f"{self._name}-{self._serial}"

    async def _build(self) -> None:
        """One attempt to have a consumer that delivers from the cursor's position on."""
        cursor, request = self.cursor, self.request
        if cursor.fruitless > request.attempts:
            reasons = cursor.rebuilds[-cursor.fruitless :]
            said = ", ".join(reason.value for reason in reasons)
            advice = "".join(f". {text}" for reason, text in _ADVICE.items() if reason in reasons)
            raise ConsumerLostError(
                f"reading {request.stream} stopped after sequence {cursor.position}: "
                f"{cursor.fruitless} consumers in a row were lost without progress ({said}){advice}"
            )
        if cursor.fruitless > 1:
            await asyncio.sleep(min(_FIRST_PAUSE * 2**cursor.fruitless, _LONGEST_PAUSE))
        # A rebuild has a reason to doubt the connection, so it is asked whether it lives.
        connection = await self._link.connection(fresh=0.0 if cursor.rebuilds else 1.0)
        jetstream = JetStream(connection)
        self._connection = connection
        self._reconnects = connection.reconnects
        self._serial += 1
        self._stalled = False
        subject = connection.client.new_inbox()
        several = len(request.filters) > 1 and not request.ends_with_list
        self._one = OneFilter(request.filters) if several and loses_messages(connection) else None
        config = consumer_config(
            replace(request, filters=(self._one.subject,)) if self._one else request,
            cursor.position,
            subject,
            seen_through=cursor.seen_through,
            flow_control=self._flow_control,
        )
        try:
            if cursor.rebuilds:
                await self._check_stream(jetstream)
            await self._create(jetstream, config)
        except (NatsSourceError, nats.errors.Error) as error:
            if isinstance(error, NatsSourceError) and not passes(error):
                raise
            if isinstance(error, ConsumerLimitError) and cursor.fruitless >= request.attempts:
                raise  # it says which setting to change
            # A server that starts, or a stream without a leader, answers so for a while.
            self._lost(Rebuild.NO_ANSWER, str(error))
            return
        cursor.created()

    async def _create(self, jetstream: JetStream, config: dict[str, Any]) -> None:
        """The consumer; with ``at_leader`` as often as it takes until the right server has it."""
        request, connection = self.request, jetstream.connection
        leader = await self._leader(jetstream) if request.at_leader else None
        if leader is None:
            self._inbox = await connection.inbox(config["deliver_subject"])
            await jetstream.create_consumer(request.stream, self._consumer, config)
            return
        for _ in range(_MOST_PLACES):
            self._orphans.append(self._consumer)
            made = ConsumerInfo.parse(
                await jetstream.add_consumer(request.stream, {"name": self._consumer, **config})
            )
            if made.leader == leader:
                # Only now: a consumer sends nothing until somebody listens, and one in the wrong
                # place would send as much as flow control lets it.
                self._inbox = await connection.inbox(config["deliver_subject"])
                self._orphans.remove(self._consumer)
                return
            # Where deletions are denied, the server removes it a minute later.
            with contextlib.suppress(PermissionDeniedError):
                await self._delete(connection, self._consumer)
                self._orphans.remove(self._consumer)
            self._serial += 1
            config["deliver_subject"] = connection.client.new_inbox()
        raise RequestTimeoutError(
            f"the server {leader!r}, which leads stream {request.stream}, was given none of "
            f"{_MOST_PLACES} consumers"
        )

    async def _leader(self, jetstream: JetStream) -> str | None:
        """The server that leads the stream and has ``end``; None where there is only one store."""
        request = self.request
        info = await jetstream.stream_info(request.stream)
        if not info.replicated:
            return None
        if info.leader is None or info.last_seq < request.target:
            raise RequestTimeoutError(
                f"stream {request.stream} has no leader that has reached {request.target}"
            )
        return info.leader

    async def _check_stream(self, jetstream: JetStream) -> None:
        request = self.request
        info = await jetstream.stream_info(request.stream)
        if info.created != request.created:
            raise DataLossError(
                f"stream {request.stream} was deleted and made again while it was read: created "
                f"{info.created}, planned {request.created}. A query goes on with the new stream "
                f"after a restart with the option failOnDataLoss=false; a watch or subscription "
                f"must be begun anew"
            )
        # A mirror may not have got yet what its upstream has, and then it is a replica that lags.
        planned = request.end != ENDLESS and not info.config.get("mirror")
        known = request.end if planned else self.cursor.seen_through
        if info.last_seq < known:
            await check_less(jetstream, info, known)
            raise DataLossError(
                f"stream {request.stream} was set back to sequence {info.last_seq} while it was "
                f"read; it had {known}. A query goes on from there after a restart with the "
                f"option failOnDataLoss=false; a watch or subscription must be begun anew"
            )

    async def _retire(self) -> None:
        """End what is left of a consumer that the cursor has given up."""
        connection = self._connection
        if connection is None or not self.cursor.rebuilds:
            return
        reason = self.cursor.rebuilds[-1]
        self._log_rebuild(reason)
        if reason is Rebuild.STALLED:
            self._flow_control = False
            log.warning(
                "flow-control answers do not reach the server, so the next consumer does "
                "without: the user's permissions, or the account's import, lack '$JS.FC.>'",
                stream=self.request.stream,
            )
        await self._drop_inbox()
        left = (name for name in self._orphans if name != self._consumer)
        self._orphans = [*left, self._consumer][-_MOST_ORPHANS:]
        if connection.client.is_connected:
            # Where this fails, the server may have it still: tried again with the next, or at the
            # end.
            with contextlib.suppress(asyncio.TimeoutError, NatsSourceError, nats.errors.Error):
                while self._orphans:
                    deletion = self._delete(connection, self._orphans[-1])
                    await within(_PONG_DEADLINE, deletion)
                    self._orphans.pop()

    def _lost(self, reason: Rebuild, detail: str) -> None:
        """Give the consumer up; ``detail`` is what the server, or the lack of one, said."""
        self._detail = detail
        self.cursor.lost(reason)

    def _log_rebuild(self, reason: Rebuild) -> None:
        """The line that ``nats_stream_source.rebuilds`` counts."""
        request, cursor = self.request, self.cursor
        log.warning(
            "consumer rebuilt",
            stream=request.stream,
            start=request.start,
            end="none" if request.end == ENDLESS else request.end,
            position=cursor.position,
            reason=reason.value,
            attempt=cursor.fruitless,
            consumer=self._consumer,
            detail=self._detail,
        )
        self._detail = ""

    async def _delete(self, connection: Connection, consumer: str) -> None:
        # Gone already is what is wanted.
        with contextlib.suppress(ConsumerNotFoundError, StreamNotFoundError):
            await JetStream(connection).delete_consumer(self.request.stream, consumer)

    async def _drop_inbox(self) -> None:
        inbox, self._inbox = self._inbox, None
        if inbox is not None and self._connection is not None:
            await self._connection.release(inbox)

    async def _leave(self) -> None:
        """Leave nothing behind: neither on the server nor under way to the next user."""
        connection, consumers = self._connection, self._orphans
        if self._inbox is not None:
            consumers = [*consumers, self._consumer]
        if connection is None or not consumers:
            return
        clean = False
        try:
            await self._drop_inbox()
            await connection.until_connected(_PONG_DEADLINE)
            # With the PONG, all that was sent before the UNSUB is here, and gone.
            clean = await connection.alive(_PONG_DEADLINE)
            if clean:
                for consumer in consumers:
                    await self._delete(connection, consumer)
        except (NatsSourceError, nats.errors.Error, OSError) as error:
            log.warning(
                "a consumer could not be deleted; the server removes it by itself",
                stream=self.request.stream,
                consumer=consumers[-1],
                error=error,
            )
        if not clean:
            await self._link.drop()

    # -- frames ---------------------------------------------------------------------------------

    async def _feed(self, arrived: list[Frames]) -> None:
        cursor = self.cursor
        before = cursor.seen_through, cursor.consumer_seq
        for frames in arrived:
            begin = 0
            for status in np.flatnonzero(~is_delivery(frames)).tolist():
                self._deliver(frames.select(slice(begin, status)))
                await self._status(frames, status)
                begin = status + 1
            self._deliver(frames.select(slice(begin, len(frames))))
        if (cursor.seen_through, cursor.consumer_seq) != before:
            self._waited = 0.0

    def _deliver(self, frames: Frames) -> None:
        if not len(frames):
            return
        frames = with_acks(frames)  # so that who gets them has the numbers too
        tokens = ack_tokens(frames)
        cuts: list[int] = []
        if self.request.last_per_subject:
            cuts = (np.flatnonzero(np.diff(tokens.stream_seq) <= 0) + 1).tolist()
        for begin, end in itertools.pairwise((0, *cuts, len(frames))):
            step = self.cursor.deliver(tokens.consumer_seq[begin:end], tokens.stream_seq[begin:end])
            if step.stop > step.first:
                kept = frames.select(slice(begin + step.first, begin + step.stop))
                if self._one is not None:
                    kept = self._one.select(kept)
                if len(kept):
                    self._kept.add(kept)

    async def _status(self, frames: Frames, i: int) -> None:
        """A message that is no delivery: the consumer's status messages (ADR-15)."""
        headers = parse_headers(frames.header(i)) if len(frames.header(i)) else None
        status = headers.status if headers else None
        if headers is None or status is None:
            log.warning("a message that is no delivery was ignored", stream=self.request.stream)
            return
        if status != 100:
            self._lost(Rebuild.CONSUMER_GONE, f"{status} {headers.description}".strip())
            return
        said = Status.of(headers, frames.reply(i).decode("utf-8", "surrogateescape"))
        if said.reply is not None:
            await self._answer(self.cursor.flow_control(said.reply))
            return
        if said.last_consumer is None or said.last_stream is None:
            self._lost(Rebuild.GAP, "a heartbeat without its numbers")
            return
        self._stalled = said.stalled is not None
        step = self.cursor.heartbeat(said.last_consumer, said.last_stream, said.stalled)
        await self._answer(step)

    async def _answer(self, step: Step) -> None:
        if step.answer is None or self._connection is None:
            return
        # Where the connection is closed, the main loop sees it next.
        try:
            with contextlib.suppress(nats.errors.Error):
                await self._connection.client.publish(step.answer)
        except UnicodeEncodeError:
            raise ProtocolError(
                f"flow control is to be answered on a subject that is not UTF-8: {step.answer!r}"
            ) from None
        # Two turns, in which nats-py's flusher writes: if Spark pauses us now, no loop runs, and
        # an answer that waits in a buffer would stall the server.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _take(self) -> list[Frames]:
        return self._inbox.take() if self._inbox is not None else []

    # -- waiting --------------------------------------------------------------------------------

    def _lost_connection(self) -> bool:
        connection = self._connection
        return connection is None or (
            connection.reconnects != self._reconnects or not connection.client.is_connected
        )

    async def _wait(self) -> None:
        inbox, connection = self._inbox, self._connection
        assert inbox is not None
        assert connection is not None
        loop = asyncio.get_running_loop()
        if self.cursor.holds_back:
            if not await inbox.wait(_HELD_BACK):
                await self._answer(self.cursor.waited())
            return
        began = loop.time()
        silent = not await inbox.wait(3 * self.request.heartbeat)
        if self.cursor.seen_through < self.request.target:
            self._waited += loop.time() - began
        if silent or (self._stalled and self.cursor.unconfirmed):
            await self._look_closer(inbox, connection, silent)
        if self._waited > self.request.catch_up:
            await self._give_up_waiting(connection)

    async def _look_closer(self, inbox: Inbox, connection: Connection, silent: bool) -> None:
        """PING/PONG: all that was sent before the PONG is here when it is."""
        answered = self.cursor.unconfirmed
        if not await connection.alive(_PONG_DEADLINE, _SLOW_PONG):
            self.cursor.lost(Rebuild.RECONNECTED)
            await self._link.drop()
            return
        arrived = inbox.take()
        await self._feed(arrived)
        if answered is not None:
            self.cursor.confirmed(answered)
        if silent and not arrived:
            self.cursor.lost(Rebuild.MISSED_HEARTBEAT)

    async def _give_up_waiting(self, connection: Connection) -> None:
        request, seen = self.request, self.cursor.seen_through
        await self._check_stream(JetStream(connection))
        raise MinLastSequenceError(
            f"min last sequence: what delivers {request.stream} has reached {seen}, not "
            f"{request.target}, and did not move on for {request.catch_up:g} s: a replica or "
            f"mirror lags (412, 10180)"
        )
