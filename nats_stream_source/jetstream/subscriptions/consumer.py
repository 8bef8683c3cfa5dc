"""The consumer of a subscription, and the buffer of what it delivered (ADR-15).

*Consumer.* It is created through ``CONSUMER.CREATE.<stream>.<name>[.<filter>]``, which all
supported servers accept; the document describes older subjects. The client names every consumer,
also an ephemeral one, so that it can be deleted even if the response to its creation was lost. The
metadata of a durable consumer contains a creator token. Without it, the server would report success
to two clients that create a durable consumer with the same configuration, and both would delete it.

*Buffer.* Frames stay in a tapped inbox until the caller requests the next item. Only then they
become objects. So a status that the server sends between messages (heartbeat, flow control) is
handled after the messages before it were delivered to the caller, as ADR-15 requires. While the
caller pauses, flow control gets no reply, and the server stops sending. Without flow control the
inbox holds at most ``max_pending_bytes`` and drops later messages, which is an error here.
nats-py's pending limits drop messages without an error (docs/internals/measurements.md, Servers 7).
Idle time is counted only during :meth:`MessageBuffer.wait`. Time that the caller spends elsewhere
does not count.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from nats_stream_source.aio.tasks import run_to_completion
from nats_stream_source.connection.inbox import Inbox
from nats_stream_source.connection.settings import PONG_TIMEOUT
from nats_stream_source.err_codes import CONSUMER_NAME_IN_USE
from nats_stream_source.errors import (
    ApiError,
    ConnectError,
    ConsumerDeletedError,
    ConsumerNotFoundError,
    DuplicateSubscriptionError,
    NatsSourceError,
    ProtocolError,
    SlowConsumerError,
    StreamNotFoundError,
    SubscribeError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumers import ConsumerInfo
from nats_stream_source.jetstream.retry import Backoff, retry
from nats_stream_source.jetstream.subscriptions.message import JsMessage, message_of
from nats_stream_source.jetstream.subscriptions.validation import (
    SubscribeRequest,
    build_consumer_config,
    verify_consumer,
)
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.consumer.messages import ACK_PREFIX, ConsumerStatus
from nats_stream_source.wire.framing.frames import FrameFields

log = field_logger(__name__)

CREATOR_METADATA_KEY = "nats-stream-source.creator"
"""Metadata key of the token that identifies the creator of a durable consumer."""

OnError = Callable[[Exception], None]
"""Receives the errors that the iteration would raise otherwise."""

_LOOKUP_ATTEMPTS = 5  # for a consumer that is reported as bound
_LOOKUP_BACKOFF = Backoff(0.05, 0.05)

DEFAULT_PENDING_BYTES = 64 << 20  # twice the largest flow-control window of a server

_S = TypeVar("_S", bound="BaseSubscription")

_ACK_PREFIX = ACK_PREFIX.encode()
_READ_GRACE = 0.02  # seconds, for what a busy event loop left in the socket


@dataclass(slots=True, eq=False)
class BoundConsumer:
    """A consumer in use by one subscription.

    Attributes:
        jetstream: the JetStream context of the consumer.
        info: the consumer's info at the start of the subscription.
        created: True if this library created the consumer for the subscription. It is then deleted
            at the end. A durable consumer that existed before is not deleted.
    """

    jetstream: JetStream
    info: ConsumerInfo
    created: bool

    async def delete(self) -> None:
        """Delete the consumer if it was created for this subscription. Later calls do nothing."""
        if self.created:
            self.created = False
            await run_to_completion(
                self.jetstream.delete_consumer(self.info.stream, self.info.name)
            )

    async def verify_exists(self) -> None:
        """Raise ConsumerDeletedError if the consumer or its stream was deleted.

        A deleted push consumer only stops sending. A missing response is not an error here: the
        connection may be lost, or the user may lack the permission for the request.
        """
        try:
            await self.jetstream.consumer_info(self.info.stream, self.info.name)
        except (ConsumerNotFoundError, StreamNotFoundError) as error:
            self.created = False
            raise ConsumerDeletedError(
                f"subscription to {self.info.label} failed: the consumer no longer exists, it was "
                f"deleted or had no subscriber for longer than its inactive_threshold; subscribe "
                f"again",
                description="Consumer Deleted",
            ) from error
        except NatsSourceError as error:
            log.debug("could not verify consumer", consumer=self.info.label, error=error)


class BaseSubscription:
    """A subscription as an async context manager. Leaving the context unsubscribes.

    Attributes:
        consumer: the consumer of the subscription.
    """

    def __init__(self, consumer: BoundConsumer, on_error: OnError | None) -> None:
        self.consumer = consumer
        self._connection = consumer.jetstream.connection
        self._on_error = on_error
        self._draining = False
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "draining" if self._draining else "open"
        return f"<{type(self).__name__} {self.info.label} {state}>"

    @property
    def info(self) -> ConsumerInfo:
        """The consumer's info at the start of the subscription."""
        return self.consumer.info

    async def unsubscribe(self) -> None:
        """End the subscription."""
        raise NotImplementedError

    def _report_error(self, error: NatsSourceError) -> None:
        if self._on_error is None:
            raise error
        self._on_error(error)

    def _reconnect_after_drain(self) -> ConnectError:
        """Give up the connection, which did not send a PONG; returns the error to raise."""
        self._connection.reconnect()
        return ConnectError(
            f"could not drain the subscription to {self.info.label}: no PONG from "
            f"{self._connection.settings.server_list} within {PONG_TIMEOUT:g} s, messages under "
            f"way may be missing; subscribe again"
        )

    async def _finish(self) -> None:
        """Delete the consumer after the last drained message (ADR-15, "Drain")."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.consumer.delete()
        except NatsSourceError as error:
            self._report_error(error)

    async def __aenter__(self: _S) -> _S:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            await self.unsubscribe()
        except NatsSourceError as cleanup_error:
            if kind is None:
                raise
            log.warning("unsubscribe failed", consumer=self.info.label, error=cleanup_error)


async def lookup_consumer(
    jetstream: JetStream, stream: str, request: SubscribeRequest
) -> BoundConsumer | None:
    """Look up and validate the named consumer; None if a new one is to be created."""
    name = request.consumer
    if name is None:
        return None

    async def look_up() -> ConsumerInfo:
        info = ConsumerInfo.parse(await jetstream.consumer_info(stream, name))
        verify_consumer(request, info)
        return info

    try:
        # The server reports the end of the last subscription with a short delay.
        info = await retry(
            look_up,
            attempts=_LOOKUP_ATTEMPTS,
            backoff=_LOOKUP_BACKOFF,
            on_error=lambda error: isinstance(error, DuplicateSubscriptionError),
        )
    except NatsSourceError as error:
        if isinstance(error, ConsumerNotFoundError) and not request.bind:
            return None
        if not request.pull or isinstance(error, SubscribeError):
            raise
        # A pull subscription continues (ADR-15, "Consumer name"): the user may have the permission
        # to pull but not to look up. If the consumer is missing, the first request reports it.
        log.warning("could not look up consumer", stream=stream, consumer=name, error=error)
        info = ConsumerInfo(stream, name, {"ack_policy": "explicit"}, False, 0, 0, None)
    return BoundConsumer(jetstream, info, created=False)


async def create_consumer(
    jetstream: JetStream,
    stream: str,
    request: SubscribeRequest,
    deliver_subject: str | None = None,
) -> BoundConsumer:
    """Create the consumer; if another client created it first, look it up and validate it."""
    prefix = jetstream.connection.settings.consumer_prefix
    token = uuid.uuid4().hex
    name = request.durable or f"{prefix}-{token[:16]}"
    config = build_consumer_config(request, name, deliver_subject)
    if request.durable:
        config["metadata"] = {**config.get("metadata", {}), CREATOR_METADATA_KEY: token}
    try:
        response = await jetstream.add_consumer(stream, config)
    except ApiError as error:
        if request.durable is None or error.err_code not in CONSUMER_NAME_IN_USE:
            raise
        info = ConsumerInfo.parse(await jetstream.consumer_info(stream, name))
        verify_consumer(request, info)
        if not request.pull and not request.queue:
            raise DuplicateSubscriptionError(
                f"could not create {info.label}: another client created it at the same time, and "
                f"it accepts one subscription only; use another durable name or a queue group"
            ) from error
        return BoundConsumer(jetstream, info, created=False)
    except BaseException:
        # No response, or cancelled: the consumer may exist.
        await run_to_completion(
            _delete_unconfirmed_consumer(
                jetstream, stream, name, token if request.durable else None
            )
        )
        raise
    return BoundConsumer(jetstream, ConsumerInfo.parse(response), created=True)


async def _delete_unconfirmed_consumer(
    jetstream: JetStream, stream: str, name: str, token: str | None
) -> None:
    """Delete a consumer that may have been created, unless its creator token is another one."""
    try:
        if token is not None:
            existing = await jetstream.consumer_info(stream, name)
            if (existing["config"].get("metadata") or {}).get(CREATOR_METADATA_KEY) != token:
                return
        await jetstream.delete_consumer(stream, name)
    except NatsSourceError as error:
        log.debug("could not delete consumer", stream=stream, consumer=name, error=error)


async def bind_push_consumer(
    jetstream: JetStream, stream: str, request: SubscribeRequest, consumer: BoundConsumer | None
) -> tuple[BoundConsumer, Inbox]:
    """Return a push consumer, created if None was found, and the inbox of its deliver subject."""
    connection, queue = jetstream.connection, request.queue or ""
    if consumer is not None:
        subject = consumer.info.config["deliver_subject"]
        return consumer, await connection.open_inbox(subject, queue, verify=True)
    subject = request.config.deliver_subject or connection.client.new_inbox()
    inbox = await connection.open_inbox(subject, queue, verify=True)
    try:
        consumer = await create_consumer(jetstream, stream, request, subject)
    except BaseException:
        await connection.close_inbox(inbox)
        raise
    if consumer.created:
        return consumer, inbox
    await connection.close_inbox(inbox)
    return await bind_push_consumer(jetstream, stream, request, consumer)


class MessageBuffer:
    """Messages and statuses of one inbox.

    Attributes:
        idle_seconds: seconds of waiting since the last frame was received.
        last_received_at: event loop time at which the last frame was received.
    """

    def __init__(self, consumer: BoundConsumer, inbox: Inbox, max_pending_bytes: int) -> None:
        inbox.max_bytes = max_pending_bytes
        self.idle_seconds = 0.0
        self.last_received_at = 0.0
        self._connection = consumer.jetstream.connection
        self._acks = consumer.info.acks
        self._inbox = inbox
        self._frames: Iterator[FrameFields] = iter(())
        self._queued = 0
        self._dropped = 0
        self._idle_until = 0.0  # the loop's time up to which the idle seconds were counted

    def next_item(self) -> JsMessage | ConsumerStatus | None:
        """Return the next message or status; None if the buffer is empty.

        Raises:
            ProtocolError: the frame is neither a message nor a status, or is malformed. The frame
                is skipped.
            SlowConsumerError: messages were dropped. Later calls return the remaining messages.
        """
        if not self._queued:
            if newly_dropped := self._inbox.dropped - self._dropped:
                self._dropped += newly_dropped
                raise SlowConsumerError(
                    f"{newly_dropped} messages were dropped: {self._inbox.max_bytes} bytes were "
                    f"already waiting for the caller; read faster, set flow_control and "
                    f"idle_heartbeat or a smaller max_ack_pending in the consumer configuration, "
                    f"or increase 'pending_bytes'",
                    settings=("pending_bytes",),
                )
            self._collect()
        if not self._queued:
            return None
        self._queued -= 1
        frame = next(self._frames)
        _, reply, block, _ = frame
        if not reply.startswith(_ACK_PREFIX):
            subject = reply.decode("utf-8", "surrogateescape")
            if (status := ConsumerStatus.parse(block, subject)) is None:
                raise ProtocolError(
                    f"invalid message: neither a delivery nor a status, reply {subject!r}"
                )
            return status
        message = message_of(self._connection, frame, acks=self._acks)
        message.metadata  # noqa: B018  (a malformed reply subject is an error here)
        return message

    def _collect(self) -> None:
        """Move all received frames out of the inbox."""
        if chunks := [chunk for chunk in self._inbox.take() if len(chunk)]:
            self.idle_seconds = 0.0
            self.last_received_at = asyncio.get_running_loop().time()
            self._frames = itertools.chain(self._frames, *(chunk.fields() for chunk in chunks))
            self._queued += sum(map(len, chunks))

    async def wait(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until a frame is received or the inbox is woken."""
        if timeout <= 0:
            await asyncio.sleep(0)  # lets the read loop run while a caller polls
            return
        loop = asyncio.get_running_loop()
        started = loop.time()
        if not await self._inbox.wait(timeout):
            await asyncio.sleep(_READ_GRACE)
        now = loop.time()
        # Several tasks may wait at once.
        self.idle_seconds += now - max(started, self._idle_until)
        self._idle_until = now

    def wake(self) -> None:
        """Make :meth:`wait` return."""
        self._inbox.wake()

    @property
    def has_items(self) -> bool:
        """Whether :meth:`next_item` returns an item, or raises an error."""
        inbox = self._inbox
        return self._queued > 0 or inbox.nbytes > 0 or inbox.dropped > self._dropped

    async def drain(self) -> bool:
        """Send UNSUB, receive what is under way, and release the inbox.

        Returns False if no PONG arrived: then messages under way may be missing.
        """
        await self._inbox.stop()
        # All messages that the server sent before its PONG were received with the PONG.
        alive = await self._connection.alive(PONG_TIMEOUT)
        self._collect()
        await self._connection.close_inbox(self._inbox)
        return alive

    async def close(self) -> None:
        """Release the inbox and drop the remaining frames."""
        self._frames, self._queued = iter(()), 0
        await self._connection.close_inbox(self._inbox)
        self._inbox.wake()
