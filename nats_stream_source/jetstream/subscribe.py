"""``subscribe``: from what is asked for to a subscription (ADR-15, "Creation").

1. The request is checked (``workflow.py``), the stream looked up by its subject.
2. A consumer that is named is looked up, and held against the request.
3. The inbox is subscribed to *before* the consumer is created: only so the server can tell that a
   push consumer is in use already.
4. The consumer is created. If another one was faster, its consumer is looked up and checked in
   turn, and the subscription is replaced by one on that consumer's deliver subject.
5. With ``min_last_seq``, nothing is handed over before the store that serves the consumer is known
   to have it (``consumer_reach.py``).

Consumers are created through ``CONSUMER.CREATE.<stream>.<name>[.<filter>]``, which all supported
servers have; the forms in the document are older ones. Every consumer gets its name here, an
ephemeral one too, so that it can be deleted also where the answer to its creation was lost. A
durable one is created with a token of its creator among its metadata: two creators with otherwise
the same configuration would both be told that they created it, and both would delete it.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Literal, TypeVar, overload

from nats_stream_source.errors import (
    ApiError,
    ConnectError,
    ConsumerNotFoundError,
    DuplicateSubscriptionError,
    NatsSourceError,
    NoMatchingStreamError,
    SubscribeError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.arrivals import MOST_BYTES, Arrivals
from nats_stream_source.jetstream.bound import BoundConsumer, OnError
from nats_stream_source.jetstream.bridge import Inbox
from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.consumer_config import ConsumerConfig, ConsumerInfo
from nats_stream_source.jetstream.consumer_reach import consumer_reached
from nats_stream_source.jetstream.finishing import finish
from nats_stream_source.jetstream.message import JsMessage
from nats_stream_source.jetstream.ordered_subscription import OrderedSubscription, ordered_range
from nats_stream_source.jetstream.pull import PullSubscription
from nats_stream_source.jetstream.read_after_write import reached
from nats_stream_source.jetstream.subscription import OnMessage, Subscription
from nats_stream_source.jetstream.workflow import (
    SubscribeRequest,
    check_consumer,
    check_request,
    new_consumer,
)
from nats_stream_source.logs import field_logger

__all__ = ["ConsumerConfig", "JsMessage", "find_stream", "subscribe"]

log = field_logger(__name__)

CREATOR = "nats-stream-source.creator"
"""The metadata key of a durable consumer's creator."""

_EXISTS = frozenset((10013, 10105, 10148))  # err_codes: the name is in use
_LOOKS, _LOOK_PAUSE = 5, 0.05  # how often, and seconds between two looks at a bound consumer
_PONG_DEADLINE = 5.0  # seconds
_REACH_TIMEOUT = 30.0  # seconds

_AnySubscription = TypeVar("_AnySubscription", Subscription, PullSubscription)


@overload
async def subscribe(
    jetstream: JetStream,
    subject: str | None = ...,
    *,
    pull: Literal[False] = ...,
    ordered: Literal[False] = ...,
    stream: str | None = ...,
    durable: str | None = ...,
    bind: str | None = ...,
    queue: str | None = ...,
    config: ConsumerConfig | None = ...,
    callback: OnMessage | None = ...,
    on_error: OnError | None = ...,
    min_last_seq: int | None = ...,
    reach_timeout: float = ...,
    pending_bytes: int = ...,
) -> Subscription: ...


@overload
async def subscribe(
    jetstream: JetStream,
    subject: str | None = ...,
    *,
    pull: Literal[True],
    ordered: Literal[False] = ...,
    stream: str | None = ...,
    durable: str | None = ...,
    bind: str | None = ...,
    queue: str | None = ...,
    config: ConsumerConfig | None = ...,
    callback: OnMessage | None = ...,
    on_error: OnError | None = ...,
    min_last_seq: int | None = ...,
    reach_timeout: float = ...,
    pending_bytes: int = ...,
) -> PullSubscription: ...


@overload
async def subscribe(
    jetstream: JetStream,
    subject: str | None = ...,
    *,
    pull: Literal[False] = ...,
    ordered: Literal[True],
    stream: str | None = ...,
    durable: str | None = ...,
    bind: str | None = ...,
    queue: str | None = ...,
    config: ConsumerConfig | None = ...,
    callback: OnMessage | None = ...,
    on_error: OnError | None = ...,
    min_last_seq: int | None = ...,
    reach_timeout: float = ...,
    pending_bytes: int = ...,
) -> OrderedSubscription: ...


async def subscribe(
    jetstream: JetStream,
    subject: str | None = None,
    *,
    pull: bool = False,
    ordered: bool = False,
    stream: str | None = None,
    durable: str | None = None,
    bind: str | None = None,
    queue: str | None = None,
    config: ConsumerConfig | None = None,
    callback: OnMessage | None = None,
    on_error: OnError | None = None,
    min_last_seq: int | None = None,
    reach_timeout: float = _REACH_TIMEOUT,
    pending_bytes: int = MOST_BYTES,
) -> Subscription | PullSubscription | OrderedSubscription:
    """Subscribe to a stream's messages through a consumer (ADR-15).

    Args:
        subject: what to receive; needed where no stream is named.
        pull, ordered: which kind; a push subscription where neither.
        stream: the stream; found by ``subject`` when None.
        durable: the name of a durable consumer: used if it exists, else created.
        bind: the name of a consumer that must exist.
        queue: the queue group; without ``durable`` and ``bind`` also the durable name.
        config: the consumer's configuration, for a new one; an existing one must not differ.
        callback: of a push subscription, gets each message; without one, iterate.
        on_error: gets alarms and errors instead of whoever asks for the next message.
        min_last_seq: nothing is delivered before what serves the consumer has this stream sequence
            (ADR-53); afterwards ``info.num_pending`` is right.
        reach_timeout: seconds to wait for that.
        pending_bytes: how many bytes may wait for the caller; beyond, SlowConsumerError.

    Raises:
        SubscribeError: and its subclasses, see ``workflow.py``; NoMatchingStreamError.
        StreamNotFoundError, ConsumerNotFoundError: what was named does not exist.
        ApiError: the server refuses the consumer's configuration.
        MinLastSequenceError: ``min_last_seq`` was not reached in time (412, 10180).
        RequestTimeoutError, PermissionDeniedError, ConnectError, JetStreamNotEnabledError.
    """
    request = check_request(
        SubscribeRequest(
            subject, stream, bind, durable, queue, pull, ordered, config or ConsumerConfig()
        )
    )
    if callback is not None and (pull or ordered):
        raise SubscribeError("a callback is for push subscriptions: iterate over this one")
    name = request.stream or await find_stream(jetstream, request.subject or "")
    if request.ordered:
        return await _ordered(jetstream, name, request, min_last_seq, reach_timeout)
    consumer = await _look_up(jetstream, name, request)
    if request.pull:
        return await _reached(
            PullSubscription(
                consumer or await _create(jetstream, name, request),
                on_error=on_error,
                pending_bytes=pending_bytes,
            ),
            min_last_seq,
            reach_timeout,
        )
    bound, arrivals = await _bind(jetstream, name, request, consumer, pending_bytes)
    subscription = await _reached(
        Subscription(bound, arrivals, on_error=on_error), min_last_seq, reach_timeout
    )
    if callback is not None:
        subscription.serve(callback)
    return subscription


async def find_stream(jetstream: JetStream, subject: str) -> str:
    """The one stream that takes ``subject`` (ADR-15, "Stream name").

    Raises:
        NoMatchingStreamError: none does, or more than one.
    """
    names = await jetstream.streams_with(subject)
    if len(names) == 1:
        return names[0]
    if names:
        raise NoMatchingStreamError(
            f"several streams take {subject!r}: {', '.join(sorted(names)[:5])}: name one"
        )
    raise NoMatchingStreamError(f"no stream takes {subject!r}: create it, or name the stream")


async def _look_up(
    jetstream: JetStream, stream: str, request: SubscribeRequest
) -> BoundConsumer | None:
    """The named consumer, checked; None when a new one is to be created."""
    name = request.consumer
    if name is None:
        return None
    try:
        info = ConsumerInfo.parse(await jetstream.consumer_info(stream, name))
    except NatsSourceError as error:
        missing = isinstance(error, ConsumerNotFoundError)
        if missing and not request.bind:
            return None
        if not request.pull:
            raise
        # A pull subscription goes on (ADR-15, "Consumer name"): its user may be one who may pull
        # and not look; and if the consumer is missing, the first request says so.
        log.warning("consumer not looked up", stream=stream, consumer=name, error=error)
        unknown = {"ack_policy": "explicit"}
        info = ConsumerInfo(stream, name, unknown, False, 0, 0, 0, None)
        return BoundConsumer(jetstream, info, created=False)
    looks = _LOOKS
    while True:
        try:
            check_consumer(request, info)
            return BoundConsumer(jetstream, info, created=False)
        except DuplicateSubscriptionError:
            # The server notes a moment later that the last subscription has ended.
            looks -= 1
            if not looks:
                raise
        await asyncio.sleep(_LOOK_PAUSE)
        info = ConsumerInfo.parse(await jetstream.consumer_info(stream, name))


async def _create(
    jetstream: JetStream,
    stream: str,
    request: SubscribeRequest,
    deliver_subject: str | None = None,
) -> BoundConsumer:
    """Create the consumer; or find, checked, the one that another creator was faster with."""
    prefix = jetstream.connection.settings.consumer_prefix
    token = uuid.uuid4().hex
    name = request.durable or f"{prefix}-{token[:16]}"
    config = new_consumer(request, name, deliver_subject)
    if request.durable:
        config["metadata"] = {**config.get("metadata", {}), CREATOR: token}
    try:
        answer = await jetstream.add_consumer(stream, config)
    except ApiError as error:
        if request.durable is None or error.err_code not in _EXISTS:
            raise
        info = ConsumerInfo.parse(await jetstream.consumer_info(stream, name))
        check_consumer(request, info)
        if not request.pull and not request.queue:
            raise DuplicateSubscriptionError(
                f"consumer {name!r} of stream {stream!r} was created by somebody else at the same "
                f"moment, and it is for one subscription only"
            ) from error
        return BoundConsumer(jetstream, info, created=False)
    except BaseException:
        # No answer, or cancelled: it may exist.
        await finish(_undo(jetstream, stream, name, token if request.durable else None))
        raise
    return BoundConsumer(jetstream, ConsumerInfo.parse(answer), created=True)


async def _undo(jetstream: JetStream, stream: str, name: str, token: str | None) -> None:
    """Delete a consumer that may have been created; one with another's creator token is left."""
    try:
        if token is not None:
            there = await jetstream.consumer_info(stream, name)
            if (there["config"].get("metadata") or {}).get(CREATOR) != token:
                return
        await jetstream.delete_consumer(stream, name)
    except NatsSourceError as error:
        log.debug("consumer not deleted", stream=stream, consumer=name, error=error)


async def _bind(
    jetstream: JetStream,
    stream: str,
    request: SubscribeRequest,
    consumer: BoundConsumer | None,
    pending_bytes: int,
) -> tuple[BoundConsumer, Arrivals]:
    """A push consumer and the subscription to its deliver subject."""
    connection, queue = jetstream.connection, request.queue or ""
    if consumer is not None:
        inbox = await _listen(connection, consumer.info.config["deliver_subject"], queue)
    else:
        if subject := request.config.deliver_subject:
            inbox = await _listen(connection, subject, queue)
        else:
            subject = connection.client.new_inbox()
            inbox = await connection.inbox(subject, queue)
        try:
            consumer = await _create(jetstream, stream, request, subject)
        except BaseException:
            await connection.release(inbox)
            raise
        if not consumer.created:
            # The race is lost: what counts is the other one's deliver subject.
            await connection.release(inbox)
            inbox = await _listen(connection, consumer.info.config["deliver_subject"], queue)
    acks = consumer.info.acks
    return consumer, Arrivals(connection, inbox, acks=acks, most_bytes=pending_bytes)


async def _listen(connection: Connection, subject: str, queue: str) -> Inbox:
    """Subscribe to a deliver subject that was named; the server's refusal is an error."""
    inbox = await connection.inbox(subject, queue)
    try:
        # A refusal comes before the PONG. Of an inbox it ends the next request, too.
        if not await connection.until_denied(subject, lambda: connection.alive(_PONG_DEADLINE)):
            connection.renew()
            raise ConnectError(f"{connection.settings.places} does not answer")
    except BaseException:
        await connection.release(inbox)
        raise
    return inbox


async def _reached(
    subscription: _AnySubscription, min_last_seq: int | None, timeout: float
) -> _AnySubscription:
    if min_last_seq is None:
        return subscription
    consumer = subscription.consumer
    jetstream, info = consumer.jetstream, consumer.info
    try:
        await consumer_reached(jetstream, info, min_last_seq, timeout)
        # Now the pending count is right.
        answer = await jetstream.consumer_info(info.stream, info.name)
        consumer.info = ConsumerInfo.parse(answer)
    except BaseException:
        try:
            await subscription.unsubscribe()
        except NatsSourceError as error:
            log.warning("not unsubscribed", consumer=consumer.where, error=error)
        raise
    return subscription


async def _ordered(
    jetstream: JetStream,
    stream: str,
    request: SubscribeRequest,
    min_last_seq: int | None,
    timeout: float,
) -> OrderedSubscription:
    if min_last_seq is not None:
        await reached(jetstream, stream, min_last_seq, timeout)
    wanted = await ordered_range(jetstream, stream, request, min_last_seq, timeout)
    subscription = OrderedSubscription(jetstream, wanted)
    if min_last_seq is not None:
        try:
            await subscription.reached()
        except BaseException:
            await subscription.unsubscribe()
            raise
    return subscription
