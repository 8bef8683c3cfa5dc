"""A pull subscription (ADR-15): messages are delivered on request (``fetch_request.py``).

Delivered messages that cannot be returned because the caller was cancelled get the response
``-NAK``, so that they are redelivered without waiting for the consumer's ack wait.

Why not nats-py's ``pull_subscribe``: its fetch treats every 409 as "no more messages", so a deleted
consumer or a request over a limit looks like an empty stream. It shares one inbox between requests
and assigns old statuses to new requests. It does not delete the consumer that it creates.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

from nats_stream_source.connection.connection import Connection
from nats_stream_source.errors import (
    AckError,
    ConflictStatusError,
    ConnectError,
    NatsSourceError,
    SingleResponseError,
    SubscriptionClosedError,
)
from nats_stream_source.jetstream.retry import Backoff
from nats_stream_source.jetstream.subscriptions.bound_consumer import (
    BaseSubscription,
    BoundConsumer,
    OnError,
)
from nats_stream_source.jetstream.subscriptions.buffer import DEFAULT_PENDING_BYTES
from nats_stream_source.jetstream.subscriptions.fetch_request import FetchRequest
from nats_stream_source.jetstream.subscriptions.message import JsMessage
from nats_stream_source.logs import field_logger

log = field_logger(__name__)

_BACKOFF = Backoff(0.05, 2.0)  # before the request that follows a rejected one
_MAX_TIMEOUT = 1e9  # seconds; the server stores nanoseconds in 64 bits

_P = TypeVar("_P", bound="PullSubscription")


class PullSubscription(BaseSubscription):
    """A pull subscription; async iterator and async context manager.

    Created by :func:`nats_stream_source.jetstream.subscriptions.subscribe.subscribe`.

    Attributes:
        consumer: the consumer of the subscription.
        batch, expires, max_bytes: size of each request that the iteration sends, in messages,
            seconds and bytes. Limits of the consumer are respected.
    """

    def __init__(
        self,
        consumer: BoundConsumer,
        *,
        on_error: OnError | None = None,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
    ) -> None:
        config = consumer.info.config
        super().__init__(consumer, on_error)
        self.batch = min(500, config.get("max_batch") or 500)
        self.expires = min(30.0, (config.get("max_expires") or 30e9) / 1e9)
        self.max_bytes: int | None = min(
            pending_bytes // 2, config.get("max_bytes") or DEFAULT_PENDING_BYTES
        )
        self._pending_bytes = pending_bytes
        self._requests: set[FetchRequest] = set()
        self._iteration_request: FetchRequest | None = None
        self._rejections = 0

    def __repr__(self) -> str:
        return f"<PullSubscription {self.consumer!r} {self._state} requests={len(self._requests)}>"

    @property
    def _connection(self) -> Connection:
        return self.consumer.jetstream.connection

    async def _open_request(
        self, batch: int, expires: float | None, max_bytes: int | None
    ) -> FetchRequest:
        if self._closed or self._draining:
            raise SubscriptionClosedError(
                f"could not request messages from {self.consumer.label}: the subscription was "
                f"closed; subscribe again"
            )
        request = FetchRequest(self.consumer, batch, expires, max_bytes, self._pending_bytes)
        self._requests.add(request)
        try:
            await request.open()
        except BaseException:
            self._requests.discard(request)
            raise
        return request

    async def _close_request(self, request: FetchRequest) -> None:
        self._requests.discard(request)
        await request.close()

    async def fetch(
        self, batch: int = 1, timeout: float | None = 5.0, *, max_bytes: int | None = None
    ) -> list[JsMessage]:
        """Return up to ``batch`` messages, when all were received or ``timeout`` seconds passed.

        Fewer messages, or an empty list, is not an error: the server has no more for now. If an
        error ends the request after some messages were received, they are returned, since the next
        fetch raises the error again if it persists. ``on_error`` receives that error.

        Args:
            batch: maximum number of messages, at least 1.
            timeout: seconds, 0.001 to 1e9; None to return the available messages without waiting.
            max_bytes: maximum bytes of messages, headers and subjects; a first message that exceeds
                it raises ConflictStatusError.

        Raises:
            ConflictStatusError: 409, for example a request over the consumer's limits;
                ConsumerDeletedError; LeadershipChangedError (retry).
            NoRespondersStatusError: 503, the consumer does not exist.
            UnknownStatusError: a status that ADR-15 does not define.
            MissedHeartbeatError, RequestTimeoutError: the server did not respond.
            SingleResponseError: an account import passes only the first responses; the messages of
                this fetch are delivered again after the consumer's ack wait.
            ConnectError: the connection was lost (retry) or closed.
            PermissionDeniedError: the user lacks the permission to publish requests.
            SubscriptionClosedError: the subscription was closed.
            ValueError: ``batch`` or ``timeout`` is out of range.
        """
        if batch < 1 or not (timeout is None or 0.001 <= timeout <= _MAX_TIMEOUT):
            raise ValueError(
                f"could not fetch: batch is {batch} and timeout {timeout}, expected batch >= 1 and "
                f"timeout from 0.001 to {_MAX_TIMEOUT:g} seconds or None"
            )
        request = await self._open_request(batch, timeout, max_bytes)
        messages: list[JsMessage] = []
        try:
            while (message := await request.next()) is not None:
                messages.append(message)
        except NatsSourceError as error:
            # The next fetch would lose messages too, so the first one fails.
            if not messages or isinstance(error, SingleResponseError):
                raise
            log.warning(
                "fetch ended early",
                consumer=self.consumer.label,
                messages=len(messages),
                error=error,
            )
            if self._on_error is not None:
                self._on_error(error)
        except BaseException:  # cancelled
            for message in messages:
                with contextlib.suppress(AckError):
                    await message.nak()
            raise
        finally:
            await self._close_request(request)
        return messages

    def __aiter__(self: _P) -> _P:
        return self

    async def __anext__(self) -> JsMessage:
        """Return the next message; send the next request after the last message of one.

        Raises:
            as :meth:`fetch`; iterate again to continue.
        """
        while True:
            request = self._iteration_request
            if request is None:
                if self._closed or self._draining:
                    await self._finish()
                    raise StopAsyncIteration
                request = self._iteration_request = await self._open_request(
                    self.batch, self.expires, self.max_bytes
                )
            try:
                if self._draining and request.empty:
                    message = None
                else:
                    message = await request.next()
            except NatsSourceError as error:
                if request.done:
                    await self._close_iteration_request(request)
                # No message is lost with the connection: those without an acknowledgement are
                # redelivered.
                if isinstance(error, ConnectError) and self._connection.client.is_connected:
                    log.warning("retrying request", consumer=self.consumer.label, error=error)
                    continue
                if self._on_error is None or not isinstance(error, ConflictStatusError):
                    raise
                self._on_error(error)
                # Without a backoff, a request that is rejected at once would be sent thousands of
                # times a second. Not `retry`: the rejections count across calls, until a message
                # is received.
                await asyncio.sleep(_BACKOFF.pause(self._rejections))
                self._rejections += 1
                continue
            if message is not None:
                self._rejections = 0
                return message
            await self._close_iteration_request(request)

    async def _close_iteration_request(self, request: FetchRequest) -> None:
        # Another task that iterates may have sent the next request already.
        if self._iteration_request is request:
            self._iteration_request = None
            await self._close_request(request)

    async def unsubscribe(self) -> None:
        """Close the subscription; delete the consumer if the subscription created it.

        Messages that were delivered and not returned get a ``-NAK``. Later calls do
        nothing.

        Raises:
            NatsSourceError: the deletion failed, with its reason (ADR-15, "Unsubscribe").
        """
        if self._closed:
            return
        self._closed = True
        self._iteration_request = None
        try:
            for request in list(self._requests):
                await self._close_request(request)
        finally:
            await self.consumer.delete()

    async def drain(self) -> None:
        """Send no more requests, return the received messages, then delete the consumer.

        A running fetch returns its messages. The iteration ends after the last message. Then the
        consumer is deleted if it was created for this subscription. If the deletion fails,
        ``on_error`` receives the error; without ``on_error`` it is raised.

        Raises:
            ConnectError: the connection was lost before all messages under way were received.
        """
        if self._closed or self._draining:
            return
        self._draining = True
        current, alive = self._iteration_request, True
        for request in list(self._requests):
            alive = await request.drain() and alive
            if request is not current:
                await request.wait_closed()
        if not alive:
            self._connection.reconnect()
            raise ConnectError(
                f"could not drain the subscription to {self.consumer.label}: no PONG from the "
                f"server, messages under way may be missing; subscribe again"
            )
        if current is not None and current.empty:
            await self._close_iteration_request(current)
        if not self._requests:
            await self._finish()
