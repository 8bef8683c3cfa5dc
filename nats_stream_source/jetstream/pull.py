"""A pull subscription (ADR-15): messages come when they are asked for (``pull_request.py``).

What was delivered and cannot be handed over, because its caller was cancelled, is given back with
``-NAK``, so that it need not wait for the consumer's ack wait.

Why not nats-py's ``pull_subscribe``: its fetch takes every 409 for "no more messages", so a deleted
consumer or a request over a limit looks like an empty stream; it shares one inbox between requests
and takes old statuses for new ones; and the consumer it creates stays.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

from nats_stream_source.errors import (
    AckError,
    ConflictStatusError,
    ConnectError,
    NatsSourceError,
    SubscriptionClosedError,
)
from nats_stream_source.jetstream.arrivals import MOST_BYTES
from nats_stream_source.jetstream.bound import BoundConsumer, Closing, OnError
from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.message import JsMessage
from nats_stream_source.jetstream.pull_request import PullRequest
from nats_stream_source.logs import field_logger

log = field_logger(__name__)

_FIRST_PAUSE = 0.05  # seconds before asking again after a refusal; doubles up to …
_LONGEST_PAUSE = 2.0
_LONGEST_WAIT = 1e9  # seconds; the server counts nanoseconds in 64 bits

_P = TypeVar("_P", bound="PullSubscription")


class PullSubscription(Closing):
    """A pull subscription; async iterator and async context manager.

    Made by :func:`nats_stream_source.jetstream.subscribe.subscribe`.

    Attributes:
        consumer: the consumer that it stands on.
        batch, expires, max_bytes: what iterating asks for at a time: messages, seconds, bytes.
            A limit that the consumer sets is kept.
    """

    def __init__(
        self,
        consumer: BoundConsumer,
        *,
        on_error: OnError | None = None,
        pending_bytes: int = MOST_BYTES,
    ) -> None:
        config = consumer.info.config
        self.consumer = consumer
        self.batch = min(500, config.get("max_batch") or 500)
        self.expires = min(30.0, (config.get("max_expires") or 30e9) / 1e9)
        self.max_bytes: int | None = min(pending_bytes // 2, config.get("max_bytes") or MOST_BYTES)
        self._on_error = on_error
        self._pending_bytes = pending_bytes
        self._open: set[PullRequest] = set()
        self._current: PullRequest | None = None
        self._refusals = 0
        self._sealed = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<PullSubscription {self.consumer!r} {self._state} requests={len(self._open)}>"

    @property
    def _connection(self) -> Connection:
        return self.consumer.jetstream.connection

    async def _request(
        self, batch: int, expires: float | None, max_bytes: int | None
    ) -> PullRequest:
        if self._closed or self._sealed:
            raise SubscriptionClosedError(f"the subscription to {self.consumer.where} was ended")
        request = PullRequest(self.consumer, batch, expires, max_bytes, self._pending_bytes)
        self._open.add(request)
        try:
            await request.open()
        except BaseException:
            self._open.discard(request)
            raise
        return request

    async def _end(self, request: PullRequest) -> None:
        self._open.discard(request)
        await request.close()

    async def fetch(
        self, batch: int = 1, timeout: float | None = 5.0, *, max_bytes: int | None = None
    ) -> list[JsMessage]:
        """Up to ``batch`` messages; returns when they are there or ``timeout`` seconds passed.

        Fewer, or none, is no error: the server has no more for now. Where an error ends the
        request after some messages came, they are returned, since the next fetch meets the error
        again if it lasts; ``on_error`` hears of it.

        Args:
            timeout: seconds, 0.001 to 1e9; None to take what is there now and not to wait.
            max_bytes: the most bytes of messages, headers and subjects; a first message that is
                larger alone is an error (ConflictStatusError).

        Raises:
            ConflictStatusError: 409: a request over the consumer's limits, …; ConsumerDeletedError;
                LeadershipChangedError (ask again).
            NoRespondersStatusError: 503: there is no such consumer.
            UnknownStatusError: a status that ADR-15 does not know.
            MissedHeartbeatError, RequestTimeoutError: no answer.
            ConnectError: the connection was lost (ask again) or closed.
            PermissionDeniedError: the user may not ask.
            SubscriptionClosedError: the subscription was ended.
        """
        if batch < 1 or not (timeout is None or 0.001 <= timeout <= _LONGEST_WAIT):
            raise ValueError(f"fetch of {batch} messages within {timeout} s")
        request = await self._request(batch, timeout, max_bytes)
        messages: list[JsMessage] = []
        try:
            while (message := await request.next()) is not None:
                messages.append(message)
        except NatsSourceError as error:
            if not messages:
                raise
            log.warning(
                "a fetch ended early",
                consumer=self.consumer.where,
                messages=len(messages),
                error=error,
            )
            if self._on_error is not None:
                self._on_error(error)
        except BaseException:  # cancelled: what was received is given back, then it is passed on
            for message in messages:
                with contextlib.suppress(AckError):
                    await message.nak()
            raise
        finally:
            await self._end(request)
        return messages

    def __aiter__(self: _P) -> _P:
        return self

    async def __anext__(self) -> JsMessage:
        """The next message; asks for the next batch when the last one has been handed over.

        Raises:
            as :meth:`fetch`; iterate again to go on.
        """
        while True:
            request = self._current
            if request is None:
                if self._closed or self._sealed:
                    await self._finish()
                    raise StopAsyncIteration
                request = self._current = await self._request(
                    self.batch, self.expires, self.max_bytes
                )
            try:
                if self._sealed and request.empty:
                    message = None
                else:
                    message = await request.next()
            except NatsSourceError as error:
                if request.done:
                    await self._drop_current(request)
                # Nothing was lost with the connection: what was not acknowledged comes again.
                if isinstance(error, ConnectError) and self._connection.client.is_connected:
                    log.warning("asking again", consumer=self.consumer.where, error=error)
                    continue
                if self._on_error is None or not isinstance(error, ConflictStatusError):
                    raise
                self._on_error(error)
                # What refuses a request at once would refuse thousands in a second.
                await asyncio.sleep(min(_FIRST_PAUSE * 2**self._refusals, _LONGEST_PAUSE))
                self._refusals += 1
                continue
            if message is not None:
                self._refusals = 0
                return message
            await self._drop_current(request)

    async def _drop_current(self, request: PullRequest) -> None:
        # Of two tasks that iterate, one may have asked anew already.
        if self._current is request:
            self._current = None
            await self._end(request)

    async def unsubscribe(self) -> None:
        """End it at once; delete the consumer if it was created for this subscription.

        What was delivered and not handed over is given back. Safe to call again.

        Raises:
            NatsSourceError: the deletion failed, with its reason (ADR-15, "Unsubscribe").
        """
        if self._closed:
            return
        self._closed = True
        self._current = None
        try:
            for request in list(self._open):
                await self._end(request)
        finally:
            await self.consumer.delete()

    async def drain(self) -> None:
        """Ask for nothing more, but hand over what has arrived; then delete the consumer.

        A fetch under way returns what it has. Iterating ends after the last message, and then the
        consumer is deleted if it was created for this subscription. Where that fails, ``on_error``
        gets the error, or it is raised where there is none.

        Raises:
            ConnectError: the connection was lost before all that was under way had arrived.
        """
        if self._closed or self._sealed:
            return
        self._sealed = True
        current, alive = self._current, True
        for request in list(self._open):
            alive = await request.seal() and alive
            if request is not current:
                await request.closed()
        if not alive:
            self._connection.renew()
            raise ConnectError(f"{self.consumer.where}: no answer while draining")
        if current is not None and current.empty:
            await self._drop_current(current)
        if not self._open:
            await self._finish()
