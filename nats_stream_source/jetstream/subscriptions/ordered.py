"""An ordered subscription (ADR-15, "Ordered Consumers"): every message once, in stream order.

It uses :class:`OrderedReader`, which re-creates the consumer after the last delivered message when
it detects a gap, missed heartbeats or a reconnect. So the subscription has neither alarms nor
acknowledgements nor a consumer to bind to. Failures that the reader cannot recover from are raised:
ConsumerLostError, DataLossError, MinLastSequenceError, ConnectError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from nats_stream_source.aio.tasks import TimedLock, run_to_completion
from nats_stream_source.errors import (
    NextTimeoutError,
    SubscribeError,
    SubscriptionClosedError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumer_config import ConsumerInfo
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.subscriptions.message import JsMessage
from nats_stream_source.jetstream.subscriptions.replica_check import wait_for_consumer_replica
from nats_stream_source.jetstream.subscriptions.validation import SubscribeRequest
from nats_stream_source.jetstream.temporary_consumer import temporary_consumer
from nats_stream_source.wire.consumer.ack_subject import AckReply
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.framing.frames import FrameFields

_HEARTBEAT = 0.5  # seconds


async def build_range_request(
    jetstream: JetStream,
    stream: str,
    request: SubscribeRequest,
    min_last_seq: int | None,
    timeout: float,
) -> RangeRequest:
    """The range that an ordered reader reads for a validated request with ``ordered``.

    The stream leader determines the start sequence once, for every deliver policy, so that a
    re-created consumer can resume from the last delivered message.

    Args:
        jetstream: the JetStream context.
        stream: the stream's name.
        request: the validated request.
        min_last_seq: the sequence that the delivering replica must reach; None for no condition.
        timeout: seconds for the delivering replica to reach ``min_last_seq``.

    Raises:
        SubscribeError: the deliver policy is unknown.
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
        start = await _find_start(jetstream, stream, request, filters)
    elif policy not in ("all", "last_per_subject"):
        raise SubscribeError(
            f"could not subscribe: deliver_policy {policy!r} is unknown; use a deliver policy of "
            f"JetStream"
        )
    reach = min_last_seq
    if policy == "last_per_subject":
        filters = filters or (">",)  # servers require a filter for this policy (10094)
        # The end of the initial values. A consumer that is re-created after it must also
        # deliver messages that are no longer the last of their subject.
        reach = max(info.last_seq, min_last_seq or 0)
    return RangeRequest(
        stream=stream,
        known=KnownStream.of(info),
        start=start,
        end=ENDLESS,
        filters=filters,
        last_per_subject=policy == "last_per_subject",
        headers_only=bool(config.headers_only),
        eager=True,
        min_last_seq=reach,
        heartbeat=config.idle_heartbeat or _HEARTBEAT,
        catch_up_timeout=timeout,
    )


async def _find_start(
    jetstream: JetStream, stream: str, request: SubscribeRequest, filters: tuple[str, ...]
) -> int:
    """The sequence before the first message that the request's deliver policy delivers.

    A short-lived pull consumer is created with that policy. Its info contains the start sequence.
    """
    config = request.config
    start = {name: value for name, value in config.json().items() if name.startswith("opt_start")}
    async with temporary_consumer(
        jetstream, stream, "place", filters, deliver_policy=config.deliver_policy, **start
    ) as consumer:
        return consumer.stream_seq


class OrderedSubscription:
    """An ordered subscription; async iterator and async context manager.

    Created by :func:`nats_stream_source.jetstream.subscriptions.subscribe.subscribe`.

    Attributes:
        reader: the ordered reader; its ``cursor`` shows the position and why consumers were
            re-created.
    """

    def __init__(self, jetstream: JetStream, request: RangeRequest) -> None:
        self.reader = OrderedReader(SharedConnection(jetstream.connection), request)
        self._connection = jetstream.connection
        self._batches = self.reader.batches()
        self._received: Iterator[FrameFields] = iter(())
        self._lock = TimedLock()
        self._read_task: asyncio.Task[Deliveries | None] | None = None
        self._failure: Exception | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<OrderedSubscription {self.reader.request.stream} {state} {self.reader.cursor!r}>"

    async def wait_for_replica(self) -> None:
        """Wait until the consumer exists and its replica has ``request.target`` (ADR-53).

        The position of the consumer may prove it. If the consumer still delivers older messages,
        ``replica_check`` checks the replica. Only the messages received until then are buffered.

        Raises:
            MinLastSequenceError: not reached within ``request.catch_up_timeout`` (412, 10180).
        """
        request, cursor = self.reader.request, self.reader.cursor
        # No turn is needed: subscribe() has not returned the subscription yet.
        frames = await self._read_batch(None)
        self._received = frames.fields()
        if not len(frames) or cursor.seen_through >= request.target:
            return
        name = AckReply.parse(frames.reply(0).decode()).consumer
        jetstream = JetStream(self._connection)
        info = ConsumerInfo.parse(await jetstream.consumer_info(request.stream, name))
        await wait_for_consumer_replica(jetstream, info, request.target, request.catch_up_timeout)

    async def next(self, timeout: float | None = None) -> JsMessage:
        """Return the next message; wait at most ``timeout`` seconds, or without limit for None.

        Raises:
            NextTimeoutError: no message was received in time.
            SubscriptionClosedError: the subscription was closed.
            ConsumerLostError, DataLossError, MinLastSequenceError, ConnectError: see the module.
        """
        if (message := self._buffered()) is not None:
            return message
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        if not await self._lock.acquire(timeout):
            raise self._timeout_error()
        try:
            while (message := self._next_received()) is None:
                remaining = None if deadline is None else deadline - loop.time()
                self._received = (await self._read_batch(remaining)).fields()
            return message
        finally:
            self._lock.release()

    def _buffered(self) -> JsMessage | None:
        """The next message that was received, unless other tasks wait for it."""
        return None if self._lock.locked() else self._next_received()

    def _next_received(self) -> JsMessage | None:
        fields = next(self._received, None)
        if fields is None:
            return None
        subject, reply, block, payload = fields
        # The reader has verified the reply's numbers, so its metadata can be parsed later.
        return JsMessage(
            self._connection,
            subject.decode("utf-8", "surrogateescape"),
            payload,
            reply.decode("utf-8", "surrogateescape"),
            block,
            acks=False,
        )

    async def _read_batch(self, timeout: float | None) -> Deliveries:
        # A separate task that survives a cancelled or timed-out wait: cancelling a generator while
        # it runs ends it, and that would end the subscription.
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise SubscriptionClosedError(f"could not read from {self!r}: it was unsubscribed")
        if self._read_task is None:
            self._read_task = asyncio.create_task(self._next_frames())
        done, _ = await asyncio.wait({self._read_task}, timeout=timeout)
        if not done:
            raise self._timeout_error()
        task, self._read_task = self._read_task, None
        frames: Deliveries | None = None
        try:
            frames = task.result()
        except asyncio.CancelledError:
            pass  # unsubscribe was called in another task
        except Exception as error:
            self._failure = error  # later calls raise it again: a failure is not an end of data
            raise
        if frames is None:
            raise SubscriptionClosedError(f"could not read from {self!r}: it was unsubscribed")
        return frames

    def _timeout_error(self) -> NextTimeoutError:
        return NextTimeoutError(
            f"no message received from {self!r} in time; call again or increase 'timeout'",
            settings=("timeout",),
        )

    async def _next_frames(self) -> Deliveries | None:
        return await anext(self._batches, None)

    def __aiter__(self) -> OrderedSubscription:
        return self

    async def __anext__(self) -> JsMessage:
        if (message := self._buffered()) is not None:
            return message
        try:
            return await self.next()
        except SubscriptionClosedError:
            raise StopAsyncIteration from None

    async def unsubscribe(self) -> None:
        """Close the subscription and delete the consumer. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        await run_to_completion(self._close_reader())

    async def _close_reader(self) -> None:
        task = self._read_task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._batches.aclose()

    async def __aenter__(self) -> OrderedSubscription:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.unsubscribe()
