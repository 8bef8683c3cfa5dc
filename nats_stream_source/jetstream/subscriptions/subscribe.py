"""Creates subscriptions: push, pull and ordered (ADR-15, "Creation").

1. The request is validated (``validation.py``), and the stream is looked up by its subject.
2. A named consumer is looked up and compared with the request.
3. The inbox is subscribed to *before* the consumer is created. Only then can the server report that
   a push consumer is already in use.
4. The consumer is created. If another client created it first, that consumer is looked up and
   compared, and the inbox is replaced by a subscription to that consumer's deliver subject.
5. With ``min_last_seq``, no message is returned before the store that serves the consumer has that
   sequence.

Steps 2 to 4 are in ``consumer.py``.

*Step 5 (ADR-53, "Consumers").* No released server honours ``min_last_seq`` in a consumer's
configuration (docs/internals/measurements.md, Servers 1), so the client verifies it. The stream
leader must have the sequence. An ordered subscription then reads at the leader. The consumer of
another subscription reads the store of the consumer leader: if that server is not the stream
leader, an ordered reader that is placed on it reads ``min_last_seq``. The heartbeats of the
consumer itself would show it too, but only after it delivered all earlier messages. With acks it
may wait long before that.

*Ordered subscriptions (ADR-15, "Ordered Consumers")* deliver every message once, in stream order.
They use :class:`OrderedReader`, which re-creates the consumer after the last delivered message when
it detects a gap, missed heartbeats or a reconnect. So such a subscription has neither alarms nor
acknowledgements nor a consumer to bind to. Failures that the reader cannot recover from are raised:
ConsumerLostError, DataLossError, MinLastSequenceError, ConnectError.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from nats_stream_source.aio.tasks import Pump, run_to_completion, wait_cancellable
from nats_stream_source.errors import (
    ConsumerLostError,
    MinLastSequenceError,
    NatsSourceError,
    NextTimeoutError,
    NoMatchingStreamError,
    RequestTimeoutError,
    SubscriptionClosedError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumers import ConsumerInfo, temporary_consumer
from nats_stream_source.jetstream.leader import wait_for_last_seq
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.retry import Backoff, is_transient, retry
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.subscriptions.consumer import (
    DEFAULT_PENDING_BYTES,
    MessageBuffer,
    OnError,
    bind_push_consumer,
    create_consumer,
    lookup_consumer,
)
from nats_stream_source.jetstream.subscriptions.message import JsMessage, message_of
from nats_stream_source.jetstream.subscriptions.pull import PullSubscription
from nats_stream_source.jetstream.subscriptions.push import OnMessage, Subscription
from nats_stream_source.jetstream.subscriptions.validation import (
    ConsumerConfig,
    SubscribeRequest,
    validate_ordered,
    validate_request,
)
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.framing.frames import FrameFields

__all__ = [
    "ConsumerConfig",
    "JsMessage",
    "find_stream",
    "subscribe",
    "subscribe_ordered",
    "subscribe_pull",
]

log = field_logger(__name__)

_DEFAULT_REACH_TIMEOUT = 30.0  # seconds
_ORDERED_HEARTBEAT = 0.5  # seconds
_HEARTBEAT = 0.1  # seconds, the shortest interval that servers accept
_BACKOFF = Backoff(_HEARTBEAT, _HEARTBEAT)


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
    elif policy not in ("all", "last_per_subject"):
        # The info of a consumer with that policy contains the sequence before its first message.
        opt = {name: value for name, value in config.json().items() if name.startswith("opt_start")}
        async with temporary_consumer(
            jetstream, stream, "place", filters, deliver_policy=policy, **opt
        ) as consumer:
            start = consumer.stream_seq
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
        at_leader=min_last_seq is not None,
        min_last_seq=reach,
        heartbeat=config.idle_heartbeat or _ORDERED_HEARTBEAT,
        catch_up_timeout=timeout,
    )


class OrderedSubscription:
    """An ordered subscription; async iterator and async context manager.

    Attributes:
        reader: the ordered reader; its ``cursor`` shows the position and why consumers were
            re-created.
    """

    def __init__(self, jetstream: JetStream, request: RangeRequest) -> None:
        self.reader = OrderedReader(SharedConnection(jetstream.connection), request)
        self._connection = jetstream.connection
        self._received: Iterator[FrameFields] = iter(())
        self._batches = Pump(self.reader.batches(), self._receive)
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<OrderedSubscription {self.reader.request.stream} {state} {self.reader.cursor!r}>"

    async def next(self, timeout: float | None = None) -> JsMessage:
        """Return the next message; wait at most ``timeout`` seconds, or without limit for None.

        Raises:
            NextTimeoutError: no message was received in time.
            SubscriptionClosedError: the subscription was closed.
            ConsumerLostError, DataLossError, MinLastSequenceError, ConnectError: see the module.
        """
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while (frame := next(self._received, None)) is None:
            now = asyncio.get_running_loop().time()
            remaining = None if deadline is None else deadline - now
            try:
                arrived = await self._batches.advance(remaining)
            except StopAsyncIteration:
                raise SubscriptionClosedError(
                    f"could not read from {self!r}: it was unsubscribed"
                ) from None
            if not arrived:
                raise NextTimeoutError(
                    f"no message received from {self!r} in time; call again or increase 'timeout'",
                    settings=("timeout",),
                )
        # The reader has verified the reply's numbers, so its metadata can be parsed later.
        return message_of(self._connection, frame, acks=False)

    def _receive(self, batch: Deliveries) -> None:
        self._received = batch.fields()

    def __aiter__(self) -> OrderedSubscription:
        return self

    async def __anext__(self) -> JsMessage:
        try:
            return await self.next()
        except SubscriptionClosedError:
            raise StopAsyncIteration from None

    async def unsubscribe(self) -> None:
        """Close the subscription and delete the consumer. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        await run_to_completion(self._batches.close())

    async def __aenter__(self) -> OrderedSubscription:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.unsubscribe()


async def subscribe(
    jetstream: JetStream,
    subject: str | None = None,
    *,
    stream: str | None = None,
    durable: str | None = None,
    bind: str | None = None,
    queue: str | None = None,
    config: ConsumerConfig | None = None,
    callback: OnMessage | None = None,
    on_error: OnError | None = None,
    min_last_seq: int | None = None,
    reach_timeout: float = _DEFAULT_REACH_TIMEOUT,
    pending_bytes: int = DEFAULT_PENDING_BYTES,
) -> Subscription:
    """Subscribe to a stream's messages through a push consumer (ADR-15).

    Args:
        jetstream: the JetStream context.
        subject: the subject to receive; required without ``stream``.
        stream: the stream's name; looked up by ``subject`` if None.
        durable: name of a durable consumer; it is created if it does not exist.
        bind: name of a consumer that must exist.
        queue: the queue group; without ``durable`` and ``bind`` also the durable name.
        config: configuration of a new consumer; an existing consumer must not differ from it.
        callback: receives each message; iterate if None.
        on_error: receives alarms and errors that the iteration would raise otherwise.
        min_last_seq: no message is delivered before the replica that serves the consumer has this
            stream sequence (ADR-53); afterwards ``info.num_pending`` is exact.
        reach_timeout: seconds to wait for ``min_last_seq``.
        pending_bytes: maximum bytes that may wait for the caller; more raise SlowConsumerError.

    Raises:
        SubscribeError: and its subclasses, see ``validation.py``; NoMatchingStreamError.
        StreamNotFoundError, ConsumerNotFoundError: the named stream or consumer does not exist.
        ApiError: the server rejected the consumer's configuration.
        MinLastSequenceError: ``min_last_seq`` was not reached in time (412, 10180).
        RequestTimeoutError, PermissionDeniedError, ConnectError, JetStreamNotEnabledError: the
            server did not process a request.
    """
    request = validate_request(
        SubscribeRequest(subject, stream, bind, durable, queue, config=config or ConsumerConfig())
    )
    name = await _stream_of(jetstream, request)
    consumer = await lookup_consumer(jetstream, name, request)
    bound, inbox = await bind_push_consumer(jetstream, name, request, consumer)
    subscription = Subscription(bound, MessageBuffer(bound, inbox, pending_bytes), on_error)
    await _wait_for_min_last_seq(subscription, min_last_seq, reach_timeout)
    if callback is not None:
        subscription.start_callback(callback)
    return subscription


async def subscribe_pull(
    jetstream: JetStream,
    subject: str | None = None,
    *,
    stream: str | None = None,
    durable: str | None = None,
    bind: str | None = None,
    config: ConsumerConfig | None = None,
    on_error: OnError | None = None,
    min_last_seq: int | None = None,
    reach_timeout: float = _DEFAULT_REACH_TIMEOUT,
    pending_bytes: int = DEFAULT_PENDING_BYTES,
) -> PullSubscription:
    """Subscribe to a stream's messages through a pull consumer (ADR-15).

    The members of a group use the same ``durable``. Arguments and errors are those of
    :func:`subscribe`.
    """
    request = validate_request(
        SubscribeRequest(
            subject, stream, bind, durable, pull=True, config=config or ConsumerConfig()
        )
    )
    name = await _stream_of(jetstream, request)
    consumer = await lookup_consumer(jetstream, name, request)
    if consumer is None:
        consumer = await create_consumer(jetstream, name, request)
    subscription = PullSubscription(consumer, on_error, pending_bytes)
    await _wait_for_min_last_seq(subscription, min_last_seq, reach_timeout)
    return subscription


async def subscribe_ordered(
    jetstream: JetStream,
    subject: str | None = None,
    *,
    stream: str | None = None,
    config: ConsumerConfig | None = None,
    min_last_seq: int | None = None,
    reach_timeout: float = _DEFAULT_REACH_TIMEOUT,
) -> OrderedSubscription:
    """Subscribe to a stream's messages in order, each once, through a consumer of its own.

    Arguments and errors are those of :func:`subscribe`; ``config`` selects the messages only.
    """
    request = SubscribeRequest(subject, stream, config=config or ConsumerConfig())
    validate_ordered(request.config)
    request = validate_request(request)
    name = await _stream_of(jetstream, request)
    if min_last_seq is not None:
        await wait_for_last_seq(jetstream, name, min_last_seq, reach_timeout)
    return OrderedSubscription(
        jetstream,
        await build_range_request(jetstream, name, request, min_last_seq, reach_timeout),
    )


async def _stream_of(jetstream: JetStream, request: SubscribeRequest) -> str:
    return request.stream or await find_stream(jetstream, request.subject or "")


async def find_stream(jetstream: JetStream, subject: str) -> str:
    """The only stream that stores ``subject``; NoMatchingStreamError if none or several do."""
    names = await jetstream.stream_names_by_subject(subject)
    if len(names) != 1:
        observed = ", ".join(sorted(names)[:5]) or "no stream has a matching subject"
        raise NoMatchingStreamError(
            f"could not find a single stream for subject {subject!r}: {observed}; name one with "
            f"'stream'",
            settings=("stream",),
        )
    return names[0]


async def _wait_for_min_last_seq(
    subscription: Subscription | PullSubscription, min_last_seq: int | None, timeout: float
) -> None:
    if min_last_seq is None:
        return
    consumer = subscription.consumer
    jetstream, info = consumer.jetstream, consumer.info
    try:
        await wait_for_consumer_replica(jetstream, info, min_last_seq, timeout)
        # From here on the pending count is exact.
        response = await jetstream.consumer_info(info.stream, info.name)
        consumer.info = ConsumerInfo.parse(response)
    except BaseException:
        try:
            await subscription.unsubscribe()
        except NatsSourceError as error:
            log.warning("unsubscribe failed", consumer=info.label, error=error)
        raise


async def wait_for_consumer_replica(
    jetstream: JetStream, info: ConsumerInfo, min_last_seq: int, timeout: float
) -> None:
    """Wait until the store that serves a consumer has ``min_last_seq``, see the module.

    Raises:
        MinLastSequenceError: not reached within ``timeout`` seconds (412, 10180).
    """
    stream = info.stream
    deadline = asyncio.get_running_loop().time() + timeout

    async def reach() -> None:
        now = await jetstream.stream_info(stream)
        server = now.leader
        if now.replicated:
            # Elections move both leaders, so both are requested each time.
            server = ConsumerInfo.parse(await jetstream.consumer_info(stream, info.name)).leader
        if now.last_seq < min_last_seq or (server is None and now.replicated):
            # A newly elected leader, or a former one that has not stepped down yet.
            raise RequestTimeoutError(f"the leader of stream {stream!r} is at {now.last_seq}")
        if server != now.leader and min_last_seq > 0:
            request = RangeRequest(
                stream,
                KnownStream(now.created),
                min_last_seq - 1,
                min_last_seq,
                server=server,
                headers_only=True,
                heartbeat=_HEARTBEAT,
                catch_up_timeout=timeout,
            )
            reader = OrderedReader(SharedConnection(jetstream.connection), request)
            async with contextlib.aclosing(reader.batches()) as batches:
                async for _ in batches:
                    pass

    await wait_for_last_seq(jetstream, stream, min_last_seq, timeout)
    remaining = deadline - asyncio.get_running_loop().time()
    with contextlib.suppress(asyncio.TimeoutError):
        await wait_cancellable(
            remaining,
            retry(
                reach,
                backoff=_BACKOFF,
                on_error=lambda error: is_transient(error) or isinstance(error, ConsumerLostError),
            ),
        )
        return
    raise MinLastSequenceError(
        f"could not verify the min last sequence of {info.label}: its replica did not reach "
        f"{min_last_seq} within {timeout:g} s, its replica lags; retry or increase "
        f"'reach_timeout' (412, 10180)",
        settings=("reach_timeout",),
    )
