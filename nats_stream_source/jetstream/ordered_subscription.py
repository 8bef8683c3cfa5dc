"""An ordered subscription (ADR-15, "Ordered Consumers"): every message once, in order, for ever.

It stands on :class:`OrderedReader`, which makes a new consumer after the last message whenever one
is lost: a gap, missed heartbeats, a reconnect. So there are no alarms, no acknowledgements, and
nothing to bind to. What the reader cannot mend is raised: ConsumerLostError, DataLossError,
MinLastSequenceError, ConnectError.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from types import TracebackType
from typing import Any

from nats_stream_source.errors import (
    NatsSourceError,
    NextTimeoutError,
    SubscribeError,
    SubscriptionClosedError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumer_config import ConsumerInfo
from nats_stream_source.jetstream.consumer_reach import consumer_reached
from nats_stream_source.jetstream.finishing import finish
from nats_stream_source.jetstream.link import SharedLink
from nats_stream_source.jetstream.message import JsMessage
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.jetstream.range_request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.turn import Turn
from nats_stream_source.jetstream.workflow import SubscribeRequest
from nats_stream_source.wire.ack_reply import AckReply
from nats_stream_source.wire.frames import Frames

_HEARTBEAT = 0.5  # seconds
_PLACE_THRESHOLD = 5_000_000_000  # nanoseconds


async def ordered_range(
    jetstream: JetStream,
    stream: str,
    request: SubscribeRequest,
    min_last_seq: int | None,
    timeout: float,
) -> RangeRequest:
    """What an ordered reader is to read for a checked request with ``ordered``.

    Where it begins is decided here, once, by the stream's leader, so that a consumer made anew can
    go on from there: each deliver policy becomes a start sequence.

    Args:
        timeout: seconds for the replica that delivers to reach ``min_last_seq``.
    """
    config = request.config
    info = await jetstream.stream_info(stream)
    filters = config.filter_subjects or ()
    if not filters and (subject := config.filter_subject or request.subject):
        filters = (subject,)
    policy = config.deliver_policy or "all"
    start = 0
    if policy == "new":
        start = info.last_seq
    elif policy == "by_start_sequence":
        start = max(config.opt_start_seq or 1, 1) - 1
    elif policy in ("last", "by_start_time"):
        start = await _place(jetstream, stream, request, filters)
    elif policy not in ("all", "last_per_subject"):
        raise SubscribeError(f"deliver_policy {policy!r} is not known")
    reach = min_last_seq
    if policy == "last_per_subject":
        filters = filters or (">",)  # servers refuse it without (10094)
        # Where the list ends: a consumer made anew behind it must not leave out what is no longer
        # the last of its subject.
        reach = max(info.last_seq, min_last_seq or 0)
    return RangeRequest(
        stream=stream,
        created=info.created,
        start=start,
        end=ENDLESS,
        filters=filters,
        last_per_subject=policy == "last_per_subject",
        headers_only=bool(config.headers_only),
        eager=True,
        reach=reach,
        heartbeat=config.idle_heartbeat or _HEARTBEAT,
        catch_up=timeout,
    )


async def _place(
    jetstream: JetStream, stream: str, request: SubscribeRequest, filters: tuple[str, ...]
) -> int:
    """The sequence before the first one that a consumer with the request's policy delivers.

    The server itself is asked: a consumer that nobody reads from says where it stands.
    """
    config: dict[str, Any] = {
        key: value for key, value in request.config.json().items() if key.startswith("opt_start")
    }
    config |= {
        "name": f"{jetstream.connection.settings.consumer_prefix}-place-{uuid.uuid4().hex[:12]}",
        "deliver_policy": request.config.deliver_policy,
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": _PLACE_THRESHOLD,
    }
    if len(filters) == 1:
        config["filter_subject"] = filters[0]
    elif filters:
        config["filter_subjects"] = list(filters)
    try:
        return ConsumerInfo.parse(await jetstream.add_consumer(stream, config)).stream_seq
    finally:
        # Where this fails, the server removes it by itself.
        with contextlib.suppress(NatsSourceError):
            await finish(jetstream.delete_consumer(stream, config["name"]))


class OrderedSubscription:
    """An ordered subscription; async iterator and async context manager.

    Made by :func:`nats_stream_source.jetstream.subscribe.subscribe`.

    Attributes:
        reader: the reader underneath; its ``cursor`` shows how far it is and why consumers were
            made anew.
    """

    def __init__(self, jetstream: JetStream, request: RangeRequest) -> None:
        self.reader = OrderedReader(SharedLink(jetstream.connection), request)
        self._connection = jetstream.connection
        self._batches = self.reader.batches()
        self._frames: Frames | None = None
        self._next = 0
        self._turn = Turn()
        self._read: asyncio.Task[Frames | None] | None = None
        self._end: Exception | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<OrderedSubscription {self.reader.request.stream} {state} {self.reader.cursor!r}>"

    async def reached(self) -> None:
        """Wait until the consumer exists and what serves it has the reader's ``reach`` (ADR-53).

        Its own position may prove it; where it is busy with what is before, ``consumer_reach.py``
        looks. Not more than what has arrived by then is held back.

        Raises:
            MinLastSequenceError: not within the reader's ``catch_up`` (412, 10180).
        """
        wanted, cursor = self.reader.request, self.reader.cursor
        # Nobody else has the subscription yet.
        if self._frames is None:
            self._frames = await self._batch(None)
        if not len(self._frames) or cursor.seen_through >= wanted.target:
            return
        name = AckReply.parse(self._frames.reply(0).decode()).consumer
        jetstream = JetStream(self._connection)
        info = ConsumerInfo.parse(await jetstream.consumer_info(wanted.stream, name))
        await consumer_reached(jetstream, info, wanted.target, wanted.catch_up)

    async def next(self, timeout: float | None = None) -> JsMessage:
        """The next message; waits at most ``timeout`` seconds, or for ever.

        Raises:
            NextTimeoutError: none came in time.
            SubscriptionClosedError: the subscription was ended.
            ConsumerLostError, DataLossError, MinLastSequenceError, ConnectError: see the module.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        if not await self._turn.take(timeout):
            raise self._late()
        try:
            while self._frames is None or self._next == len(self._frames):
                left = None if deadline is None else deadline - loop.time()
                self._frames, self._next = await self._batch(left), 0
            frames, i = self._frames, self._next
            self._next += 1
        finally:
            self._turn.give()
        subject, reply = frames.subject(i), frames.reply(i)
        return JsMessage(
            self._connection,
            subject.decode("utf-8", "surrogateescape"),
            frames.payload(i),
            reply.decode("utf-8", "surrogateescape"),
            frames.header(i),
            acks=False,
        )

    async def _batch(self, timeout: float | None) -> Frames:
        # In a task of its own, which outlives the wait for it: a generator that is cancelled in
        # the middle is at its end, and the subscription would be, too.
        if self._end is not None:
            raise self._end
        if self._closed:
            raise SubscriptionClosedError(f"{self!r} was ended")
        if self._read is None:
            self._read = asyncio.create_task(self._advance())
        done, _ = await asyncio.wait({self._read}, timeout=timeout)
        if not done:
            raise self._late()
        task, self._read = self._read, None
        frames: Frames | None = None
        try:
            frames = task.result()
        except asyncio.CancelledError:
            pass  # by unsubscribe, from another task
        except Exception as error:
            self._end = error  # whatever ended the reader, it is no end of data
            raise
        if frames is None:
            raise SubscriptionClosedError(f"{self!r} was ended")
        return frames

    def _late(self) -> NextTimeoutError:
        return NextTimeoutError(f"{self!r}: no message in time")

    async def _advance(self) -> Frames | None:
        return await anext(self._batches, None)

    def __aiter__(self) -> OrderedSubscription:
        return self

    async def __anext__(self) -> JsMessage:
        try:
            return await self.next()
        except SubscriptionClosedError:
            raise StopAsyncIteration from None

    async def unsubscribe(self) -> None:
        """End it and delete the consumer. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        await finish(self._leave())

    async def _leave(self) -> None:
        read = self._read
        if read is not None:
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)
        await self._batches.aclose()

    async def __aenter__(self) -> OrderedSubscription:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.unsubscribe()
