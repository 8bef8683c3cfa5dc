"""A pull subscription (ADR-15): messages are delivered on request.

Every request has its own inbox, so the response to an earlier request is not mistaken for its own.
A request ends when all requested messages were received, or when the server reports that it sends
no more: status 404 or 408, which the caller does not see, or an error. A request of half a second
or longer requests heartbeats, and three missed heartbeats raise MissedHeartbeatError. A shorter
request fails ``request_timeout`` after its expiry. Delivered messages that cannot be returned
because the caller was cancelled get the response ``-NAK``, so that they are redelivered without
waiting for the consumer's ack wait. The cancelled call ends after a PONG, which follows the
messages under way.

A service import of another account passes one response to a request. If its export has the response
type "stream", it passes the responses up to the first empty message
(docs/internals/measurements.md, Servers 15). Nothing arrives after that. So if heartbeats are
missing on a live connection, after a response and over an import, the error is
SingleResponseError. A request for one message over an import does without heartbeats: its one
response is the message, or the status that ends it.

Why not nats-py's ``pull_subscribe``: its fetch treats every 409 as "no more messages", so a deleted
consumer or a request over a limit looks like an empty stream. It shares one inbox between requests
and assigns old statuses to new requests. It does not delete the consumer that it creates.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

import nats.errors

from nats_stream_source.aio.tasks import run_to_completion
from nats_stream_source.connection.settings import PONG_TIMEOUT
from nats_stream_source.errors import (
    ConflictStatusError,
    ConnectError,
    MissedHeartbeatError,
    NatsSourceError,
    RequestTimeoutError,
    SingleResponseError,
    SubscriptionClosedError,
)
from nats_stream_source.jetstream.retry import Backoff
from nats_stream_source.jetstream.subjects import is_account_import
from nats_stream_source.jetstream.subscriptions.consumer import (
    DEFAULT_PENDING_BYTES,
    BaseSubscription,
    BoundConsumer,
    MessageBuffer,
    OnError,
)
from nats_stream_source.jetstream.subscriptions.message import JsMessage
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.consumer.messages import (
    CONFLICT,
    CONTROL,
    ConsumerStatus,
    status_error,
)

log = field_logger(__name__)

_BACKOFF = Backoff(0.05, 2.0)  # before the request that follows a rejected one
_MAX_TIMEOUT = 1e9  # seconds; the server stores nanoseconds in 64 bits
_MISSED_HEARTBEATS = 3  # heartbeat intervals (ADR-15, "Heartbeats")
_MIN_EXPIRES_FOR_HEARTBEAT = 0.5  # seconds; shorter requests have no heartbeats
_MAX_HEARTBEAT = 5.0  # seconds
_BYTE_LIMIT_REACHED = "Message Size Exceeds MaxBytes"

_P = TypeVar("_P", bound="PullSubscription")


class FetchRequest:
    """One request for messages; the arguments are those of :meth:`PullSubscription.fetch`.

    Attributes:
        done: whether :meth:`next` returns no more messages.
        closed: set by :meth:`close`.
    """

    def __init__(
        self,
        consumer: BoundConsumer,
        batch: int,
        expires: float | None,
        max_bytes: int | None,
        max_pending_bytes: int = DEFAULT_PENDING_BYTES,
    ) -> None:
        self.done = False
        self.closed = asyncio.Event()
        self._consumer = consumer
        self._remaining = batch
        self._received = 0
        self._expires = expires
        self._max_bytes = max_bytes
        self._max_pending_bytes = max_pending_bytes
        self._buffer: MessageBuffer | None = None
        self._connection = consumer.jetstream.connection
        self._reconnects = 0
        self._draining = False
        self._label = consumer.info.label
        settings, info = self._connection.settings, consumer.info
        self._subject = f"{settings.api_prefix}.CONSUMER.MSG.NEXT.{info.stream}.{info.name}"
        self._heartbeat: float | None = None
        self._imported = is_account_import(settings.api_prefix)
        self._responded = False
        one_response = self._imported and batch == 1
        if expires is not None and expires >= _MIN_EXPIRES_FOR_HEARTBEAT and not one_response:
            self._heartbeat = min(expires / 4, _MAX_HEARTBEAT)

    async def open(self) -> None:
        """Subscribe to an inbox, then send the request."""
        connection = self._connection
        subject = connection.client.new_inbox()
        inbox = await connection.open_inbox(subject)
        self._buffer = MessageBuffer(self._consumer, inbox, self._max_pending_bytes)
        self._reconnects = connection.reconnects
        request: dict[str, Any] = {"batch": self._remaining}
        if self._expires is None:
            request["no_wait"] = True
        else:
            request["expires"] = round(self._expires * 1e9)
        if self._heartbeat is not None:
            request["idle_heartbeat"] = round(self._heartbeat * 1e9)
        if self._max_bytes is not None:
            request["max_bytes"] = self._max_bytes
        try:
            await connection.publish(self._subject, json.dumps(request).encode(), reply=subject)
        except BaseException as error:  # includes cancellation: the inbox must be released
            await self.close()
            if not isinstance(error, (nats.errors.Error, OSError)):
                raise
            raise ConnectError(
                f"could not request messages from {self._label}: {error}; retry once the "
                f"connection is restored"
            ) from error

    async def next(self) -> JsMessage | None:
        """Return the next message; None after the end of the request.

        Raises: as :meth:`PullSubscription.fetch`, and ProtocolError: a frame was malformed. Unless
            ``done`` is True then, the request goes on.
        """
        while not self.done and (buffer := self._buffer) is not None:
            item = buffer.next_item()
            self._responded = self._responded or item is not None
            if isinstance(item, JsMessage):
                self._received += 1
                self._remaining -= 1
                self.done = self._remaining == 0
                return item
            if isinstance(item, ConsumerStatus):
                self._handle_status(item)
            elif self._draining:
                self.done = True
            else:
                try:
                    await self._wait_for_items(buffer)
                except NatsSourceError:
                    self.done = True
                    raise
        return None

    def _handle_status(self, status: ConsumerStatus) -> None:
        if status.code == CONTROL:
            return
        self.done = True
        byte_limit_reached = (
            status.code == CONFLICT and status.description == _BYTE_LIMIT_REACHED and self._received
        )
        if not (status.ends_request or byte_limit_reached):
            raise status_error(status, self._label)

    async def _wait_for_items(self, buffer: MessageBuffer) -> None:
        connection = self._connection
        if connection.client.is_closed:
            raise ConnectError(
                f"fetch from {self._label} failed: the connection is closed; connect again"
            )
        if self._reconnects != connection.reconnects:
            raise ConnectError(
                f"fetch from {self._label} failed: the connection was lost and the server dropped "
                f"the request; fetch again"
            )
        if self._heartbeat is not None:
            limit = _MISSED_HEARTBEATS * self._heartbeat
        else:
            limit = (self._expires or 0.0) + connection.settings.request_timeout
        remaining = limit - buffer.idle_seconds
        # A permission error is the only response to a denied request.
        await connection.run_until_denied(self._subject, lambda: buffer.wait(remaining))
        if buffer.has_items or buffer.idle_seconds < limit:
            return
        if self._imported and self._responded and await self._connection.alive(PONG_TIMEOUT):
            raise SingleResponseError(
                f"fetch from {self._label} failed: the account import passed {self._received} of "
                f"{self._received + self._remaining} messages and nothing more; export "
                f"'$JS.API.CONSUMER.MSG.NEXT.>' with response_type 'stream' to this account "
                f"(which passes the messages up to the first empty one), or fetch one message at "
                f"a time"
            )
        if self._heartbeat is not None:
            raise MissedHeartbeatError(
                f"fetch from {self._label} failed: neither message nor heartbeat for "
                f"{limit:g} s, the server may be down or unreachable; fetch again"
            )
        raise RequestTimeoutError(
            f"fetch from {self._label} failed: no response to the request within "
            f"{limit:g} s; fetch again or increase 'request_timeout'"
        )

    async def drain(self) -> bool:
        """Stop receiving; received messages stay available. False: no PONG from the server."""
        if (buffer := self._buffer) is None:
            return True
        alive = await buffer.drain()
        self._draining = True
        buffer.wake()
        return alive

    @property
    def empty(self) -> bool:
        """Whether all received messages were returned."""
        return self._buffer is None or not self._buffer.has_items

    async def close(self, unused: Sequence[JsMessage] = ()) -> None:
        """End the request; send ``-NAK`` for ``unused`` and for messages that were not returned."""
        ended, self.done = self.done, True
        buffer, self._buffer = self._buffer, None
        messages = deque(unused)
        try:
            if buffer is not None and not ended and self._connection.client.is_connected:
                # UNSUB precedes each -NAK, or the server could redeliver to this request.
                await buffer.drain()
            while messages or (buffer is not None and buffer.has_items):
                try:
                    if buffer is None or messages:  # None: another call has closed it
                        await messages.popleft().nak()
                    elif isinstance(item := buffer.next_item(), JsMessage):
                        await item.nak()
                except NatsSourceError as error:
                    # The message is only delayed: it is delivered again after the ack wait.
                    log.debug("could not send -NAK", error=error)
        finally:
            if buffer is not None:
                await buffer.close()
                self.closed.set()


class PullSubscription(BaseSubscription):
    """A pull subscription; async iterator and async context manager.

    Attributes:
        batch, expires, max_bytes: size of each request that the iteration sends, in messages,
            seconds and bytes. Limits of the consumer are respected.
    """

    def __init__(
        self, consumer: BoundConsumer, on_error: OnError | None, pending_bytes: int
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

    async def _open_request(
        self, batch: int, expires: float | None, max_bytes: int | None
    ) -> FetchRequest:
        if self._closed or self._draining:
            raise SubscriptionClosedError(
                f"could not request messages from {self.info.label}: the subscription was "
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

    async def _close_request(self, request: FetchRequest, unused: Sequence[JsMessage] = ()) -> None:
        self._requests.discard(request)
        await request.close(unused)

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
                consumer=self.info.label,
                messages=len(messages),
                error=error,
            )
            if self._on_error is not None:
                self._on_error(error)
        except BaseException:  # cancelled
            await run_to_completion(self._close_request(request, messages))
            raise
        finally:
            await self._close_request(request)
        return messages

    def __aiter__(self: _P) -> _P:
        return self

    async def __anext__(self) -> JsMessage:
        """Return the next message, or raise as :meth:`fetch`; iterate again to continue."""
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
                message = await request.next()
            except NatsSourceError as error:
                if request.done:
                    await self._close_iteration_request(request)
                # No message is lost with the connection: those without an acknowledgement are
                # redelivered.
                if isinstance(error, ConnectError) and self._connection.client.is_connected:
                    log.warning("retrying request", consumer=self.info.label, error=error)
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

        Messages that were delivered and not returned get a ``-NAK``. Later calls do nothing.

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
                await request.closed.wait()
        if not alive:
            raise self._reconnect_after_drain()
        if current is not None and current.empty:
            await self._close_iteration_request(current)
        if not self._requests:
            await self._finish()
