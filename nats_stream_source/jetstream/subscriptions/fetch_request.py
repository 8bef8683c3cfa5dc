"""One pull request: requests messages, and detects its end (ADR-15).

Every request has its own inbox, so the response to an earlier request is not mistaken for its own.
A request ends when all requested messages were received, or when the server reports that it sends
no more: status 404 or 408, which the caller does not see, or an error. A request of half a second
or longer requests heartbeats, and three missed heartbeats raise MissedHeartbeatError. A shorter
request fails ``request_timeout`` after its expiry.

A service import of another account passes one response to a request. If its export has the response
type "stream", it passes the responses up to the first empty message
(docs/internals/measurements.md, Servers 15). Nothing arrives after that. So if heartbeats are
missing on a live connection, after a response and over an import, the error is
SingleResponseError. A request for one message over an import does without heartbeats: its one
response is the message, or the status that ends it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import nats.errors

from nats_stream_source.connection.liveness import PONG_TIMEOUT
from nats_stream_source.errors import (
    ConnectError,
    MissedHeartbeatError,
    NatsSourceError,
    RequestTimeoutError,
    SingleResponseError,
)
from nats_stream_source.jetstream.subjects import is_account_import
from nats_stream_source.jetstream.subscriptions.bound_consumer import BoundConsumer
from nats_stream_source.jetstream.subscriptions.buffer import DEFAULT_PENDING_BYTES, MessageBuffer
from nats_stream_source.jetstream.subscriptions.message import JsMessage
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.consumer.status import CONFLICT, CONTROL, ConsumerStatus, status_error

log = field_logger(__name__)

_MISSED_HEARTBEATS = 3  # heartbeat intervals (ADR-15, "Heartbeats")
_MIN_EXPIRES_FOR_HEARTBEAT = 0.5  # seconds; shorter requests have no heartbeats
_MAX_HEARTBEAT = 5.0  # seconds
_BYTE_LIMIT_REACHED = "Message Size Exceeds MaxBytes"


class FetchRequest:
    """One request for up to ``batch`` messages within ``expires`` seconds."""

    def __init__(
        self,
        consumer: BoundConsumer,
        batch: int,
        expires: float | None,
        max_bytes: int | None,
        max_pending_bytes: int = DEFAULT_PENDING_BYTES,
    ) -> None:
        """Create a request.

        Args:
            consumer: the pull consumer.
            batch: maximum number of messages.
            expires: seconds; None requests only messages that are available now.
            max_bytes: maximum bytes of messages, headers and subjects; None for no limit.
            max_pending_bytes: maximum bytes that may wait for the caller.
        """
        self.consumer = consumer
        self.remaining = batch
        self.received = 0
        self.done = False
        self._expires = expires
        self._max_bytes = max_bytes
        self._max_pending_bytes = max_pending_bytes
        self._buffer: MessageBuffer | None = None
        self._connection = consumer.jetstream.connection
        self._reconnects = 0
        self._draining = False
        self._closed = asyncio.Event()
        settings, info = self._connection.settings, consumer.info
        self._subject = f"{settings.api_prefix}.CONSUMER.MSG.NEXT.{info.stream}.{info.name}"
        self._heartbeat: float | None = None
        self._imported = is_account_import(settings.api_prefix)
        self._responded = False
        one_response = self._imported and batch == 1
        if expires is not None and expires >= _MIN_EXPIRES_FOR_HEARTBEAT and not one_response:
            self._heartbeat = min(expires / 4, _MAX_HEARTBEAT)

    async def open(self) -> None:
        """Subscribe to an inbox, then send the request.

        Raises:
            ConnectError: the connection is closed.
        """
        connection = self._connection
        subject = connection.client.new_inbox()
        inbox = await connection.open_inbox(subject)
        acks = self.consumer.info.acks
        self._buffer = MessageBuffer(
            connection, inbox, acks=acks, max_pending_bytes=self._max_pending_bytes
        )
        self._reconnects = connection.reconnects
        try:
            await connection.publish(self._subject, self._request_body(), reply=subject)
        except BaseException as error:  # includes cancellation: the inbox must be released
            await self.close()
            if not isinstance(error, (nats.errors.Error, OSError)):
                raise
            raise ConnectError(
                f"could not request messages from {self.consumer.label}: {error}; retry once the "
                f"connection is restored"
            ) from error

    def _request_body(self) -> bytes:
        request: dict[str, Any] = {"batch": self.remaining}
        if self._expires is None:
            request["no_wait"] = True
        else:
            request["expires"] = round(self._expires * 1e9)
        if self._heartbeat is not None:
            request["idle_heartbeat"] = round(self._heartbeat * 1e9)
        if self._max_bytes is not None:
            request["max_bytes"] = self._max_bytes
        return json.dumps(request).encode()

    async def next(self) -> JsMessage | None:
        """Return the next message; None after the end of the request.

        Raises:
            StatusError: the server refused or ended the request.
            MissedHeartbeatError, RequestTimeoutError: the server did not respond.
            ConnectError: the connection was lost or closed; the server dropped the request.
            ProtocolError: a frame was malformed; call again to continue.
        """
        buffer = self._buffer
        if self.done or buffer is None:
            return None
        while True:
            item = buffer.next_item()
            self._responded = self._responded or item is not None
            if isinstance(item, JsMessage):
                self.received += 1
                self.remaining -= 1
                self.done = self.remaining == 0
                return item
            if isinstance(item, ConsumerStatus):
                self._handle_status(item)
            elif self._draining:
                self.done = True
            elif self._reconnects != self._connection.reconnects:
                self.done = True
                raise ConnectError(
                    f"fetch from {self.consumer.label} failed: the connection was lost and the "
                    f"server dropped the request; fetch again"
                )
            else:
                await self._wait_for_items(buffer)
            if self.done:
                return None

    def _handle_status(self, status: ConsumerStatus) -> None:
        if status.code == CONTROL:
            return
        self.done = True
        byte_limit_reached = (
            status.code == CONFLICT and status.description == _BYTE_LIMIT_REACHED and self.received
        )
        if not (status.ends_request or byte_limit_reached):
            raise status_error(status, self.consumer.label)

    async def _wait_for_items(self, buffer: MessageBuffer) -> None:
        if self._connection.client.is_closed:
            self.done = True
            raise ConnectError(
                f"fetch from {self.consumer.label} failed: the connection is closed; connect again"
            )
        if self._heartbeat is not None:
            limit = _MISSED_HEARTBEATS * self._heartbeat
        else:
            limit = (self._expires or 0.0) + self._connection.settings.request_timeout
        remaining_seconds = limit - buffer.idle_seconds
        try:
            # A permission error is the only response to a denied request.
            await self._connection.run_until_denied(
                self._subject, lambda: buffer.wait(remaining_seconds)
            )
        except NatsSourceError:
            self.done = True
            raise
        if buffer.has_items or buffer.idle_seconds < limit:
            return
        self.done = True
        if self._imported and self._responded and await self._connection.alive(PONG_TIMEOUT):
            raise SingleResponseError(
                f"fetch from {self.consumer.label} failed: the account import passed "
                f"{self.received} of {self.received + self.remaining} messages and nothing more; "
                f"export '$JS.API.CONSUMER.MSG.NEXT.>' with response_type 'stream' to this account "
                f"(which passes the messages up to the first empty one), or fetch one message at "
                f"a time"
            )
        if self._heartbeat is not None:
            raise MissedHeartbeatError(
                f"fetch from {self.consumer.label} failed: neither message nor heartbeat for "
                f"{limit:g} s, the server may be down or unreachable; fetch again"
            )
        raise RequestTimeoutError(
            f"fetch from {self.consumer.label} failed: no response to the request within "
            f"{limit:g} s; fetch again or increase 'request_timeout'"
        )

    async def drain(self) -> bool:
        """Stop receiving; received messages stay available. False: no PONG from the server."""
        if self._buffer is None:
            return True
        await self._buffer.unsubscribe()
        alive = await self._connection.alive(PONG_TIMEOUT)
        if (buffer := self._buffer) is not None:
            self._draining = True
            await buffer.detach()
            buffer.wake()
        return alive

    async def wait_closed(self) -> None:
        """Wait for :meth:`close`."""
        await self._closed.wait()

    @property
    def empty(self) -> bool:
        """Whether all received messages were returned."""
        return self._buffer is None or not self._buffer.has_items

    async def close(self) -> None:
        """End the request; send ``-NAK`` for received messages that were not returned."""
        self.done = True
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        try:
            await nak_pending(buffer)
        finally:
            await buffer.close()
            self._closed.set()


async def nak_pending(buffer: MessageBuffer) -> None:
    """Send ``-NAK`` for the remaining messages of a buffer."""
    while True:
        try:
            item = buffer.next_item()
            if item is None:
                return
            if isinstance(item, JsMessage):
                await item.nak()
        except NatsSourceError as error:
            # The message is only delayed: it is delivered again after the ack wait.
            log.debug("could not send -NAK", error=error)
