"""Creates subscriptions: push, pull and ordered (ADR-15, "Creation").

1. The request is validated (``validation.py``), and the stream is looked up by its subject.
2. A named consumer is looked up and compared with the request.
3. The inbox is subscribed to *before* the consumer is created. Only then can the server report that
   a push consumer is already in use.
4. The consumer is created. If another client created it first, that consumer is looked up and
   compared, and the inbox is replaced by a subscription to that consumer's deliver subject.
5. With ``min_last_seq``, no message is returned before the store that serves the consumer has that
   sequence (``replica_check.py``).

Steps 2 to 4 are in ``consumer_setup.py``.
"""

from __future__ import annotations

from nats_stream_source.errors import NatsSourceError, NoMatchingStreamError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumer_config import ConsumerConfig, ConsumerInfo
from nats_stream_source.jetstream.leader import wait_for_last_seq
from nats_stream_source.jetstream.subscriptions.bound_consumer import OnError
from nats_stream_source.jetstream.subscriptions.buffer import DEFAULT_PENDING_BYTES
from nats_stream_source.jetstream.subscriptions.consumer_setup import (
    bind_push_consumer,
    create_consumer,
    lookup_consumer,
)
from nats_stream_source.jetstream.subscriptions.message import JsMessage
from nats_stream_source.jetstream.subscriptions.ordered import (
    OrderedSubscription,
    build_range_request,
)
from nats_stream_source.jetstream.subscriptions.pull import PullSubscription
from nats_stream_source.jetstream.subscriptions.push import OnMessage, Subscription
from nats_stream_source.jetstream.subscriptions.replica_check import wait_for_consumer_replica
from nats_stream_source.jetstream.subscriptions.validation import (
    SubscribeRequest,
    validate_ordered,
    validate_request,
)
from nats_stream_source.logs import field_logger

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
    bound, buffer = await bind_push_consumer(jetstream, name, request, consumer, pending_bytes)
    subscription = Subscription(bound, buffer, on_error=on_error)
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
    subscription = PullSubscription(consumer, on_error=on_error, pending_bytes=pending_bytes)
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
    subscription = OrderedSubscription(
        jetstream,
        await build_range_request(jetstream, name, request, min_last_seq, reach_timeout),
    )
    if min_last_seq is not None:
        try:
            await subscription.wait_for_replica()
        except BaseException:
            await subscription.unsubscribe()
            raise
    return subscription


async def _stream_of(jetstream: JetStream, request: SubscribeRequest) -> str:
    return request.stream or await find_stream(jetstream, request.subject or "")


async def find_stream(jetstream: JetStream, subject: str) -> str:
    """Return the name of the only stream that stores ``subject`` (ADR-15, "Stream name").

    Raises:
        NoMatchingStreamError: no stream, or more than one.
    """
    names = await jetstream.stream_names_by_subject(subject)
    if len(names) == 1:
        return names[0]
    if names:
        raise NoMatchingStreamError(
            f"could not find a single stream for subject {subject!r}: observed "
            f"{', '.join(sorted(names)[:5])}; name one with 'stream'",
            settings=("stream",),
        )
    raise NoMatchingStreamError(
        f"could not find a stream for subject {subject!r}: no stream has a matching subject; "
        f"create the stream or name one with 'stream'",
        settings=("stream",),
    )


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
            log.warning("unsubscribe failed", consumer=consumer.label, error=error)
        raise
