"""One pull request: asking for messages, and knowing when no more come (ADR-15).

Every request has an inbox of its own, so an answer to an earlier one cannot be taken for its own.
It ends when all messages it asked for are there or the server says that no more come: 404 and 408,
which nobody sees, or an error. Where it lasts half a second or longer it asks for heartbeats, and
three intervals without anything are an alarm (MissedHeartbeatError); a shorter one is given up
``request_timeout`` after its end.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import nats.errors

from nats_stream_source.errors import (
    ConnectError,
    MissedHeartbeatError,
    NatsSourceError,
    RequestTimeoutError,
)
from nats_stream_source.jetstream.arrivals import MOST_BYTES, Arrivals
from nats_stream_source.jetstream.bound import BoundConsumer
from nats_stream_source.jetstream.message import JsMessage
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.status import CONFLICT, CONTROL, Status, status_error

log = field_logger(__name__)

_ALARM_AFTER = 3  # heartbeat intervals (ADR-15, "Heartbeats")
_SHORTEST = 0.5  # seconds that a request with heartbeats lasts at least
_LONGEST_INTERVAL = 5.0  # seconds between two heartbeats
_TOO_LARGE = "Message Size Exceeds MaxBytes"
_PONG_DEADLINE = 5.0  # seconds


class PullRequest:
    """One request for up to ``batch`` messages within ``expires`` seconds."""

    def __init__(
        self,
        consumer: BoundConsumer,
        batch: int,
        expires: float | None,
        max_bytes: int | None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """``expires`` None: only what is there now. ``most_bytes`` may wait for the caller."""
        self.consumer = consumer
        self.left = batch
        self.received = 0
        self.done = False
        self._expires = expires
        self._max_bytes = max_bytes
        self._most_bytes = most_bytes
        self._arrivals: Arrivals | None = None
        self._connection = consumer.jetstream.connection
        self._reconnects = 0
        self._sealed = False
        self._closed = asyncio.Event()
        settings, info = self._connection.settings, consumer.info
        self._subject = f"{settings.api_prefix}.CONSUMER.MSG.NEXT.{info.stream}.{info.name}"
        self._interval: float | None = None
        if expires is not None and expires >= _SHORTEST:
            self._interval = min(expires / 4, _LONGEST_INTERVAL)

    def __repr__(self) -> str:
        state = "done" if self.done else "open"
        return f"<PullRequest {self.consumer.info.name} {state} received={self.received}>"

    async def open(self) -> None:
        """Subscribe to an inbox, then ask.

        Raises:
            ConnectError: the connection is closed.
        """
        connection = self._connection
        subject = connection.client.new_inbox()
        inbox = await connection.inbox(subject)
        acks = self.consumer.info.acks
        self._arrivals = Arrivals(connection, inbox, acks=acks, most_bytes=self._most_bytes)
        self._reconnects = connection.reconnects
        try:
            await connection.client.publish(self._subject, self._json(), reply=subject)
        except BaseException as error:  # also cancelled: the inbox must not stay
            await self.close()
            if not isinstance(error, (nats.errors.Error, OSError)):
                raise
            raise ConnectError(f"{self.consumer.where}: not asked: {error}") from error

    def _json(self) -> bytes:
        request: dict[str, Any] = {"batch": self.left}
        if self._expires is None:
            request["no_wait"] = True
        else:
            request["expires"] = round(self._expires * 1e9)
        if self._interval is not None:
            request["idle_heartbeat"] = round(self._interval * 1e9)
        if self._max_bytes is not None:
            request["max_bytes"] = self._max_bytes
        return json.dumps(request).encode()

    async def next(self) -> JsMessage | None:
        """The next message; None when the request has come to its end.

        Raises:
            StatusError: the server refused or ended the request.
            MissedHeartbeatError, RequestTimeoutError: no answer.
            ConnectError: the connection was lost or closed: the server has forgotten the request.
            ProtocolError: what cannot be read; ask on.
        """
        arrivals = self._arrivals
        if self.done or arrivals is None:
            return None
        while True:
            item = arrivals.pop()
            if isinstance(item, JsMessage):
                self.received += 1
                self.left -= 1
                self.done = self.left == 0
                return item
            if isinstance(item, Status):
                self._status(item)
            elif self._sealed:
                self.done = True
            elif self._reconnects != self._connection.reconnects:
                self.done = True
                raise ConnectError(f"{self.consumer.where}: the connection was lost: ask again")
            else:
                await self._wait(arrivals)
            if self.done:
                return None

    def _status(self, status: Status) -> None:
        if status.code == CONTROL:
            return
        self.done = True
        full = status.code == CONFLICT and status.description == _TOO_LARGE and self.received
        if not (status.ends_request or full):
            raise status_error(status, self.consumer.where)

    async def _wait(self, arrivals: Arrivals) -> None:
        if self._connection.client.is_closed:
            self.done = True
            raise ConnectError(f"{self.consumer.where}: the connection is closed")
        if self._interval is not None:
            limit = _ALARM_AFTER * self._interval
        else:
            limit = (self._expires or 0.0) + self._connection.settings.request_timeout
        rest = limit - arrivals.silence
        try:
            # A denied request has no other answer.
            await self._connection.until_denied(self._subject, lambda: arrivals.wait(rest))
        except NatsSourceError:
            self.done = True
            raise
        if arrivals.arrived or arrivals.silence < limit:
            return
        self.done = True
        if self._interval is not None:
            raise MissedHeartbeatError(
                f"{self.consumer.where}: neither message nor heartbeat for {limit:g} s: the server "
                f"may be gone, or out of reach"
            )
        raise RequestTimeoutError(
            f"{self.consumer.where}: no answer to a request for messages within {limit:g} s "
            f"(option 'requestTimeout')"
        )

    async def seal(self) -> bool:
        """Receive nothing new; what has arrived can still be taken. False: the server is silent."""
        if self._arrivals is None:
            return True
        await self._arrivals.stop()
        alive = await self._connection.alive(_PONG_DEADLINE)
        if (arrivals := self._arrivals) is not None:
            self._sealed = True
            await arrivals.seal()
            arrivals.wake()
        return alive

    async def closed(self) -> None:
        """Wait for :meth:`close`."""
        await self._closed.wait()

    @property
    def empty(self) -> bool:
        """Whether nothing that has arrived is left to take."""
        return self._arrivals is None or not self._arrivals.arrived

    async def close(self) -> None:
        """End it, and give back what arrived and was not taken."""
        self.done = True
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is None:
            return
        try:
            await give_back(arrivals)
        finally:
            await arrivals.close()
            self._closed.set()


async def give_back(arrivals: Arrivals) -> None:
    """``-NAK`` the messages that nobody takes any more."""
    while True:
        try:
            item = arrivals.pop()
            if item is None:
                return
            if isinstance(item, JsMessage):
                await item.nak()
        except NatsSourceError as error:
            # Not more than a delay is lost: the ack wait brings them back.
            log.debug("not given back", error=error)
