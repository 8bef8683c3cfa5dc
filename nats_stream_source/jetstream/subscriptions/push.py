"""A push subscription (ADR-15): delivers messages one by one and handles statuses internally.

The caller receives, in the order of arrival:

- messages;
- alarms: no message or heartbeat for three heartbeat intervals (MissedHeartbeatError), a gap in the
  consumer sequence (ConsumerGapError), more pending bytes than the limit (SlowConsumerError),
  flow-control replies that do not reach the server (FlowControlLostError);
- error statuses (StatusError) and malformed frames (ProtocolError).

Alarms and errors are raised by the call that requests the next message. The subscription stays
open, and the call may be repeated. With ``on_error`` they are passed to that callback instead.
Errors that end the subscription (the consumer was deleted, the connection was closed) are always
raised.

Idle heartbeats and flow control are not visible to the caller. A flow-control request gets a reply
at its position among the messages: after the messages before it were returned and the next one is
requested. A heartbeat with ``Nats-Consumer-Stalled`` gets one in the same way. Each subject is
replied to once, until a reconnect.

Why not nats-py's ``subscribe``: it creates the consumer before it subscribes, so two members of one
durable both receive it. It does not compare an existing consumer with the requested configuration.
It checks gaps and heartbeats only for its ordered consumer. Iterating over it does not reply to
flow control. Its pending limits drop messages. It never deletes the consumer that it created.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.errors

from nats_stream_source.aio.tasks import wait_cancellable
from nats_stream_source.errors import (
    ConnectError,
    ConsumerGapError,
    FlowControlLostError,
    MissedHeartbeatError,
    NatsSourceError,
    NextTimeoutError,
    ProtocolError,
    SlowConsumerError,
    SubscriptionClosedError,
)
from nats_stream_source.jetstream.subscriptions.consumer import (
    BaseSubscription,
    BoundConsumer,
    MessageBuffer,
    OnError,
)
from nats_stream_source.jetstream.subscriptions.message import JsMessage
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.consumer.messages import (
    CONTROL,
    ConsumerStatus,
    Gap,
    GapDetector,
    status_error,
)

log = field_logger(__name__)

OnMessage = Callable[[JsMessage], Awaitable[None]]
_S = TypeVar("_S", bound="Subscription")

_RECOVERABLE_ERRORS = (
    MissedHeartbeatError,
    ConsumerGapError,
    SlowConsumerError,
    FlowControlLostError,
    ProtocolError,
)
_MAX_STALLED_HEARTBEATS = 3
_MISSED_HEARTBEATS = 3  # heartbeat intervals (ADR-15, "Heartbeats")
_EXISTENCE_CHECK_INTERVAL = 30.0  # seconds without a message from a consumer without heartbeats
_EXISTENCE_CHECK_TIMEOUT = 1.0  # seconds; limits the delay of a missed-heartbeat alarm


class _FlowControl:
    """Answers the flow-control requests of one consumer (ADR-15, "Flow Control").

    The server stops delivering until it receives the reply to its request. It repeats the subject
    of a missing reply as ``Nats-Consumer-Stalled`` in its idle heartbeats. A reply can be lost on
    its way (a route, a leaf node, a gateway), so each heartbeat that still reports the consumer as
    stalled after a reply gets another one. Several of them in a row show that replies do not reach
    the server at all.
    """

    def __init__(self, consumer: BoundConsumer) -> None:
        self._connection = consumer.jetstream.connection
        self._label = consumer.info.label
        self._interval = consumer.info.heartbeat or 0.0
        self._last_subject: str | None = None
        self._last_reply_time = 0.0
        self._stalled_heartbeats = 0

    def reset(self) -> None:
        """Answer the last subject again when the server repeats it."""
        self._last_subject = None

    async def handle(self, status: ConsumerStatus, received_at: float) -> None:
        """Handle a control status (100), received at ``received_at`` of the loop's clock."""
        subject = status.reply or status.stalled
        if subject is None:
            self._stalled_heartbeats = 0
        elif subject != self._last_subject:
            if await self._publish(subject):
                self._stalled_heartbeats = 0
        elif status.reply is None and received_at >= self._last_reply_time + self._interval:
            # A heartbeat received within one interval may have been sent before the reply.
            self._stalled_heartbeats += 1
            if self._stalled_heartbeats >= _MAX_STALLED_HEARTBEATS:
                self._stalled_heartbeats = 0
                raise FlowControlLostError(
                    f"{self._label} is stalled: {_MAX_STALLED_HEARTBEATS} heartbeats report that "
                    f"flow-control replies did not reach the server; add '$JS.FC.>' to the user's "
                    f"permissions or to the account's imports"
                )
            await self._publish(subject)

    async def _publish(self, subject: str) -> bool:
        try:
            await self._connection.publish(subject)
        except (nats.errors.Error, OSError) as error:
            # The next heartbeat repeats the request.
            log.warning("could not send flow-control reply", consumer=self._label, error=error)
            return False
        self._last_subject = subject
        self._last_reply_time = asyncio.get_running_loop().time()
        return True


class Subscription(BaseSubscription):
    """A push subscription; async iterator and async context manager."""

    def __init__(
        self, consumer: BoundConsumer, buffer: MessageBuffer, on_error: OnError | None
    ) -> None:
        super().__init__(consumer, on_error)
        self._buffer = buffer
        self._deferred: JsMessage | None = None
        self._reconnects = self._connection.reconnects
        self._failure: NatsSourceError | None = None
        self._callback_task: asyncio.Task[None] | None = None
        # The sequence of an existing consumer is unknown until the first message.
        self._gaps = GapDetector(0 if consumer.created else None)
        self._flow_control = _FlowControl(consumer)

    # -- messages -------------------------------------------------------------------------------

    async def next(self, timeout: float | None = None) -> JsMessage:
        """Return the next message; wait at most ``timeout`` seconds, or without limit for None.

        Raises:
            NextTimeoutError: no message was received in time.
            SubscriptionClosedError: the subscription was closed or drained.
            ConsumerDeletedError: the consumer was deleted.
            MissedHeartbeatError, ConsumerGapError, SlowConsumerError, FlowControlLostError,
                StatusError, ProtocolError: see the module; call again to continue.
        """
        if self._callback_task is not None:
            raise RuntimeError(
                "could not read the next message: the subscription delivers to its callback; "
                "subscribe without a callback to iterate"
            )
        return await self._next(timeout)

    def __aiter__(self: _S) -> _S:
        return self

    async def __anext__(self) -> JsMessage:
        try:
            return await self.next()
        except SubscriptionClosedError:
            # Only unsubscribe and drain end the iteration. Other failures are errors.
            if self._failure is None:
                raise StopAsyncIteration from None
            raise

    async def _next(self, timeout: float | None) -> JsMessage:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            try:
                if self._failure is not None:
                    raise self._failure
                if (message := await self._next_item()) is not None:
                    return message
                if not self._buffer.has_items:
                    await self._wait_for_items(deadline)
            except _RECOVERABLE_ERRORS as error:
                self._report_error(error)

    async def _next_item(self) -> JsMessage | None:
        """Return the next message; None if a status was handled or the buffer is empty."""
        if self._closed:
            raise self._closed_error("closed")
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            return deferred
        item = self._buffer.next_item()
        if isinstance(item, JsMessage):
            self._deferred = item  # returned after the alarm, if there is a gap
            self._verify_no_gap(self._gaps.message(item.metadata.consumer_seq))
            self._deferred = None
            return item
        if isinstance(item, ConsumerStatus):
            await self._handle_status(item)
        elif self._draining:
            await self._finish()
            raise self._closed_error("drained")
        return None

    def _closed_error(self, how: str) -> SubscriptionClosedError:
        return SubscriptionClosedError(
            f"could not read from {self.info.label}: the subscription was {how}; subscribe again"
        )

    # -- statuses and gaps ----------------------------------------------------------------------

    async def _handle_status(self, status: ConsumerStatus) -> None:
        last = status.last_consumer
        # At once: another task may receive the next message meanwhile.
        gap = None if last is None else self._gaps.heartbeat(last)
        if status.code != CONTROL:
            self._report_error(status_error(status, self.info.label))
        else:
            await self._flow_control.handle(status, self._buffer.last_received_at)
        self._verify_no_gap(gap)

    def _verify_no_gap(self, gap: Gap | None) -> None:
        # Other members of a queue group may have received the missing messages.
        if gap is not None and not self.info.config.get("deliver_group"):
            raise ConsumerGapError(
                f"gap in {self.info.label}: observed consumer sequence {gap.received}, expected "
                f"{gap.expected}, messages were lost in transit; with an ack policy they are "
                f"redelivered, call again to continue"
            )

    # -- waiting --------------------------------------------------------------------------------

    async def _wait_for_items(self, deadline: float | None) -> None:
        await self._verify_connection()
        buffer, interval = self._buffer, self.info.heartbeat
        idle_limit = _MISSED_HEARTBEATS * interval if interval else _EXISTENCE_CHECK_INTERVAL
        timeout = idle_limit - buffer.idle_seconds
        if deadline is not None:
            timeout = min(timeout, deadline - asyncio.get_running_loop().time())
        await buffer.wait(timeout)
        if buffer.has_items or self._closed:
            return
        if buffer.idle_seconds >= idle_limit:
            buffer.idle_seconds = 0.0
            await self._handle_idle_timeout(interval)
        if deadline is not None and asyncio.get_running_loop().time() >= deadline:
            raise NextTimeoutError(
                f"no message received from {self.info.label} in time; call again or increase "
                f"'timeout'",
                settings=("timeout",),
            )

    async def _verify_connection(self) -> None:
        if self._connection.client.is_closed:
            self._failure = ConnectError(
                f"subscription to {self.info.label} failed: the connection to "
                f"{self._connection.settings.server_list} was closed; connect and subscribe again"
            )
            raise self._failure
        if self._connection.reconnects != self._reconnects:
            self._reconnects = self._connection.reconnects
            self._flow_control.reset()  # the last reply may be lost
            await self._verify_consumer()

    async def _handle_idle_timeout(self, interval: float | None) -> None:
        if self._connection.client.is_connected:
            try:
                await wait_cancellable(_EXISTENCE_CHECK_TIMEOUT, self._verify_consumer())
            except asyncio.TimeoutError:
                log.debug("no response to consumer check", consumer=self.info.label)
        if interval is not None:
            raise MissedHeartbeatError(
                f"no delivery from {self.info.label}: neither message nor heartbeat for "
                f"{_MISSED_HEARTBEATS * interval:g} s, the server may be down or unreachable; call "
                f"again to continue"
            )

    async def _verify_consumer(self) -> None:
        try:
            await self.consumer.verify_exists()
        except NatsSourceError as error:
            self._failure = error
            raise

    # -- the callback ---------------------------------------------------------------------------

    def start_callback(self, callback: OnMessage) -> None:
        """Start a task that passes every message to ``callback``, one after the other.

        Errors of ``next`` and of the callback are passed to ``on_error``. Without ``on_error``, and
        for errors that end the subscription, the task ends; ``unsubscribe``, ``drain`` or leaving
        the context raises the error.
        """
        self._callback_task = asyncio.create_task(self._run_callback(callback))

    async def _run_callback(self, callback: OnMessage) -> None:
        while True:
            try:
                message = await self._next(None)
            except SubscriptionClosedError:
                return
            except Exception as error:
                if self._on_error is not None:
                    self._on_error(error)
                log.error("delivery to callback failed", consumer=self.info.label, error=error)
                raise
            try:
                await callback(message)
            except Exception as error:  # user code may raise any exception
                if self._on_error is None:
                    log.error("callback failed", consumer=self.info.label, message=message)
                    raise
                self._on_error(error)

    async def _wait_for_callback_task(self) -> None:
        """Wait for the callback's task; raise its error unless ``on_error`` received it."""
        task, self._callback_task = self._callback_task, None
        if task is None or task is asyncio.current_task():
            return
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise  # the caller was cancelled, not the task
        except Exception:
            if self._on_error is None:
                raise

    # -- the end --------------------------------------------------------------------------------

    async def unsubscribe(self) -> None:
        """Close the subscription; delete the consumer if the subscription created it.

        Messages that were received and not returned are dropped. Later calls do nothing.

        Raises:
            NatsSourceError: the deletion failed, with its reason (ADR-15, "Unsubscribe"); or the
                callback's task had ended with an error.
        """
        if self._closed:
            return
        self._closed = True
        if self._callback_task is not None and self._callback_task is not asyncio.current_task():
            self._callback_task.cancel()
        try:
            await self._buffer.close()
            await self._wait_for_callback_task()
        finally:
            await self.consumer.delete()

    async def drain(self) -> None:
        """Stop receiving, deliver the received messages, then delete the consumer.

        With a callback, returns after the callback processed the last message. Otherwise the caller
        continues to iterate, and the iteration ends after the last message. The consumer is deleted
        only then, so that all messages can be acknowledged, and only if it was created for this
        subscription. If the deletion fails, ``on_error`` receives the error; without ``on_error``
        it is raised.

        Raises:
            ConnectError: the connection was lost before all messages under way were received.
        """
        if self._closed or self._draining:
            return
        alive = await self._buffer.drain()
        self._draining = True
        self._buffer.wake()
        if not alive:
            raise self._reconnect_after_drain()
        if self._callback_task is not None:
            await self._wait_for_callback_task()
        elif not self._buffer.has_items:
            await self._finish()
