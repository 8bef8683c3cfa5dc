"""Look-up, creation and binding of the consumer of a subscription (ADR-15, "Creating").

Consumers are created through ``CONSUMER.CREATE.<stream>.<name>[.<filter>]``, which all supported
servers accept; the document describes older subjects. The client names every consumer, also an
ephemeral one, so that it can be deleted even if the response to its creation was lost. The metadata
of a durable consumer contains a creator token. Without it, the server would report success to two
clients that create a durable consumer with the same configuration, and both would delete it.
"""

from __future__ import annotations

import uuid

from nats_stream_source.aio.tasks import run_to_completion
from nats_stream_source.connection.connection import Connection
from nats_stream_source.connection.inbox import Inbox
from nats_stream_source.connection.liveness import PONG_TIMEOUT
from nats_stream_source.err_codes import CONSUMER_NAME_IN_USE
from nats_stream_source.errors import (
    ApiError,
    ConnectError,
    ConsumerNotFoundError,
    DuplicateSubscriptionError,
    NatsSourceError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumer_config import ConsumerInfo
from nats_stream_source.jetstream.retry import Backoff, retry
from nats_stream_source.jetstream.subscriptions.bound_consumer import BoundConsumer
from nats_stream_source.jetstream.subscriptions.buffer import MessageBuffer
from nats_stream_source.jetstream.subscriptions.validation import (
    SubscribeRequest,
    build_consumer_config,
    verify_consumer,
)
from nats_stream_source.logs import field_logger

log = field_logger(__name__)

CREATOR_METADATA_KEY = "nats-stream-source.creator"
"""Metadata key of the token that identifies the creator of a durable consumer."""

_LOOKUP_ATTEMPTS = 5  # for a consumer that is reported as bound
_LOOKUP_BACKOFF = Backoff(0.05, 0.05)


async def lookup_consumer(
    jetstream: JetStream, stream: str, request: SubscribeRequest
) -> BoundConsumer | None:
    """Look up and validate the named consumer; None if a new one is to be created."""
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
        # A pull subscription continues (ADR-15, "Consumer name"): the user may have the permission
        # to pull but not to look up. If the consumer is missing, the first request reports it.
        log.warning("could not look up consumer", stream=stream, consumer=name, error=error)
        unknown = {"ack_policy": "explicit"}
        info = ConsumerInfo(stream, name, unknown, False, 0, 0, 0, None)
        return BoundConsumer(jetstream, info, created=False)
    latest: ConsumerInfo | None = info

    async def bind() -> BoundConsumer:
        nonlocal latest
        current = latest or ConsumerInfo.parse(await jetstream.consumer_info(stream, name))
        latest = None
        verify_consumer(request, current)
        return BoundConsumer(jetstream, current, created=False)

    # The server reports the end of the last subscription with a short delay.
    return await retry(
        bind,
        attempts=_LOOKUP_ATTEMPTS,
        backoff=_LOOKUP_BACKOFF,
        on_error=lambda error: isinstance(error, DuplicateSubscriptionError),
    )


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
                f"could not create consumer {name!r} of stream {stream!r}: another client created "
                f"it at the same time, and it accepts one subscription only; use another durable "
                f"name or a queue group"
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
    jetstream: JetStream,
    stream: str,
    request: SubscribeRequest,
    consumer: BoundConsumer | None,
    pending_bytes: int,
) -> tuple[BoundConsumer, MessageBuffer]:
    """Return a push consumer and a subscription to its deliver subject."""
    connection, queue = jetstream.connection, request.queue or ""
    if consumer is not None:
        inbox = await _subscribe_deliver_subject(
            connection, consumer.info.config["deliver_subject"], queue
        )
    else:
        if subject := request.config.deliver_subject:
            inbox = await _subscribe_deliver_subject(connection, subject, queue)
        else:
            subject = connection.client.new_inbox()
            inbox = await connection.open_inbox(subject, queue)
        try:
            consumer = await create_consumer(jetstream, stream, request, subject)
        except BaseException:
            await connection.close_inbox(inbox)
            raise
        if not consumer.created:
            # Another client created the consumer first: use its deliver subject.
            await connection.close_inbox(inbox)
            inbox = await _subscribe_deliver_subject(
                connection, consumer.info.config["deliver_subject"], queue
            )
    acks = consumer.info.acks
    return consumer, MessageBuffer(connection, inbox, acks=acks, max_pending_bytes=pending_bytes)


async def _subscribe_deliver_subject(connection: Connection, subject: str, queue: str) -> Inbox:
    """Subscribe to a deliver subject; raise the server's permission error if it is denied."""
    inbox = await connection.open_inbox(subject, queue)
    try:
        # The server sends a permission error before the PONG. For an inbox, the error also ends the
        # next request.
        if not await connection.run_until_denied(subject, lambda: connection.alive(PONG_TIMEOUT)):
            connection.reconnect()
            raise ConnectError(
                f"could not subscribe to {subject!r}: no PONG from "
                f"{connection.settings.server_list} within {PONG_TIMEOUT:g} s; retry"
            )
    except BaseException:
        await connection.close_inbox(inbox)
        raise
    return inbox
