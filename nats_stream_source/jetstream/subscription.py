"""A push subscription (ADR-15): messages one by one, statuses handled out of sight.

What comes to the caller, in the order of arrival:

- messages;
- alarms: nothing came for three heartbeat intervals (MissedHeartbeatError), the consumer sequence
  jumped (ConsumerGapError), more waited than may (SlowConsumerError), the server does not get the
  flow-control answers (FlowControlLostError);
- statuses that are errors (StatusError) and what cannot be read (ProtocolError).

Alarms and errors are raised to whoever asks for the next message, who may ask again: the
subscription goes on. Where ``on_error`` is given, they go there instead. Only what ends the
subscription (the consumer is gone, the connection is closed) is always raised.

Hidden are idle heartbeats and flow control. A flow-control request is answered where it stands
among the messages: when those before it were handed over and the next one is asked for. A heartbeat
that says ``Nats-Consumer-Stalled`` is answered like it; each subject once, until a reconnect.

Why not nats-py's ``subscribe``: it creates the consumer before it subscribes, so two members of
one durable both get it; it does not compare an existing consumer; it checks neither gaps nor
heartbeats except for its ordered consumer; iterating over it answers no flow control; its pending
limits drop messages; it never deletes the consumer that it created.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.errors

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
from nats_stream_source.jetstream.arrivals import Arrivals
from nats_stream_source.jetstream.bound import BoundConsumer, Closing, OnError
from nats_stream_source.jetstream.message import JsMessage
from nats_stream_source.jetstream.turn import Turn
from nats_stream_source.jetstream.within import within
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.gaps import Gap, GapWatch
from nats_stream_source.wire.status import CONTROL, Status, status_error

log = field_logger(__name__)

OnMessage = Callable[[JsMessage], Awaitable[None]]
_S = TypeVar("_S", bound="Subscription")

_ALARMS = (
    MissedHeartbeatError,
    ConsumerGapError,
    SlowConsumerError,
    FlowControlLostError,
    ProtocolError,
)
_ALARM_AFTER = 3  # heartbeat intervals (ADR-15, "Heartbeats")
_LOOK_AFTER = 30.0  # seconds of silence after which a consumer without heartbeats is looked for
_LOOK_DEADLINE = 1.0  # seconds; an alarm does not wait longer for the reason
_PONG_DEADLINE = 5.0  # seconds


class Subscription(Closing):
    """A push subscription; async iterator and async context manager.

    Made by :func:`nats_stream_source.jetstream.subscribe.subscribe`.

    Attributes:
        consumer: the consumer it stands on.
    """

    def __init__(
        self,
        consumer: BoundConsumer,
        arrivals: Arrivals,
        *,
        on_error: OnError | None = None,
    ) -> None:
        self.consumer = consumer
        self._connection = consumer.jetstream.connection
        self._arrivals = arrivals
        self._on_error = on_error
        self._turn = Turn()
        self._held: JsMessage | None = None
        self._reconnects = self._connection.reconnects
        self._sealed = False
        self._closed = False
        self._end: NatsSourceError | None = None
        self._task: asyncio.Task[None] | None = None
        # Where the consumer was there before, its sequence is known with the first message.
        self._gaps = GapWatch(0 if consumer.created else None)
        self._answered: str | None = None
        self._answered_at = 0.0
        self._stalls = 0

    def __repr__(self) -> str:
        return f"<Subscription {self.consumer!r} {self._state} {self._gaps!r}>"

    # -- messages -------------------------------------------------------------------------------

    async def next(self, timeout: float | None = None) -> JsMessage:
        """The next message; waits at most ``timeout`` seconds, or for ever.

        Raises:
            NextTimeoutError: none came in time.
            SubscriptionClosedError: the subscription was ended, or is drained.
            ConsumerDeletedError: the consumer is gone.
            MissedHeartbeatError, ConsumerGapError, SlowConsumerError, FlowControlLostError,
                StatusError, ProtocolError: see the module; ask again to go on.
        """
        if self._task is not None:
            raise RuntimeError("the messages of this subscription go to its callback")
        return await self._next(timeout)

    def __aiter__(self: _S) -> _S:
        return self

    async def __anext__(self) -> JsMessage:
        try:
            return await self.next()
        except SubscriptionClosedError:
            # What ended otherwise than by unsubscribe or drain is an error, not an end.
            if self._end is None:
                raise StopAsyncIteration from None
            raise

    async def _next(self, timeout: float | None) -> JsMessage:
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        if not await self._turn.take(timeout):
            raise self._late()
        try:
            while True:
                try:
                    if self._end is not None:
                        raise self._end
                    if (message := await self._pop()) is not None:
                        return message
                    if not self._arrivals.arrived:
                        await self._wait(deadline)
                except _ALARMS as error:
                    self._report(error)
        finally:
            self._turn.give()

    def _late(self) -> NextTimeoutError:
        return NextTimeoutError(f"{self.consumer.where}: no message in time")

    async def _pop(self) -> JsMessage | None:
        """The next message, or None when a status was handled or nothing is there."""
        if self._closed:
            raise SubscriptionClosedError(f"the subscription to {self.consumer.where} was ended")
        held, self._held = self._held, None
        if held is not None:
            return held
        item = self._arrivals.pop()
        if isinstance(item, JsMessage):
            self._follow(item)
            return item
        if isinstance(item, Status):
            await self._status(item)
        elif self._sealed:
            await self._finish()
            raise SubscriptionClosedError(f"the subscription to {self.consumer.where} is drained")
        return None

    # -- gaps -----------------------------------------------------------------------------------

    @property
    def _shared(self) -> bool:
        """Whether others have what is missing here: a queue group knows no gaps."""
        return bool(self.info.config.get("deliver_group"))

    def _follow(self, message: JsMessage) -> None:
        gap = self._gaps.message(message.metadata.consumer_seq)
        if gap and not self._shared:
            self._held = message  # comes after the alarm
            raise self._gap_error(gap)

    def _follow_heartbeat(self, last_consumer: int) -> None:
        gap = self._gaps.heartbeat(last_consumer)
        if gap and not self._shared:
            raise self._gap_error(gap)

    def _gap_error(self, gap: Gap) -> ConsumerGapError:
        return ConsumerGapError(
            f"{self.consumer.where}: the consumer sequence went on with {gap.found} where "
            f"{gap.expected} was next: messages did not arrive. With acks they are delivered again"
        )

    # -- statuses -------------------------------------------------------------------------------

    async def _status(self, status: Status) -> None:
        if status.code != CONTROL:
            self._report(status_error(status, self.consumer.where))
        elif status.reply is not None:
            await self._answer(status.reply)
        elif status.stalled is not None:
            if status.stalled != self._answered:
                await self._answer(status.stalled)
            else:
                self._still_stalled()
        else:
            self._stalls = 0
        if status.last_consumer is not None:
            self._follow_heartbeat(status.last_consumer)

    async def _answer(self, subject: str) -> None:
        if subject == self._answered:
            return
        try:
            await self._connection.client.publish(subject)
        except (nats.errors.Error, OSError) as error:
            # Not answered: the next heartbeat says again that the server waits.
            log.warning("flow control not answered", consumer=self.consumer.where, error=error)
            return
        self._answered = subject
        self._answered_at = asyncio.get_running_loop().time()
        self._stalls = 0

    def _still_stalled(self) -> None:
        """A heartbeat that says stalled though it was answered: sent before the answer, or lost?"""
        interval = self.info.heartbeat or 0.0
        if self._arrivals.heard < self._answered_at + interval:
            return
        self._stalls += 1
        if self._stalls >= _ALARM_AFTER:
            self._stalls = 0
            raise FlowControlLostError(
                f"{self.consumer.where}: flow-control answers do not reach the server, so it waits "
                f"for ever: the user's permissions, or the account's import, lack '$JS.FC.>'"
            )

    # -- waiting --------------------------------------------------------------------------------

    async def _wait(self, deadline: float | None) -> None:
        await self._look_at_connection()
        arrivals, interval = self._arrivals, self.info.heartbeat
        limit = _ALARM_AFTER * interval if interval else _LOOK_AFTER
        timeout = limit - arrivals.silence
        if deadline is not None:
            timeout = min(timeout, deadline - asyncio.get_running_loop().time())
        await arrivals.wait(timeout)
        if arrivals.arrived or self._closed:
            return
        if arrivals.silence >= limit:
            arrivals.silence = 0.0
            await self._silent(interval)
        if deadline is not None and asyncio.get_running_loop().time() >= deadline:
            raise self._late()

    async def _look_at_connection(self) -> None:
        if self._connection.client.is_closed:
            self._end = ConnectError(
                f"the connection to {self._connection.settings.places} was closed under the "
                f"subscription to {self.consumer.where}"
            )
            raise self._end
        if self._connection.reconnects != self._reconnects:
            self._reconnects = self._connection.reconnects
            self._answered = None  # whether the last answer arrived is not known
            await self._check()

    async def _silent(self, interval: float | None) -> None:
        if self._connection.client.is_connected:
            try:
                await within(_LOOK_DEADLINE, self._check())
            except asyncio.TimeoutError:
                log.debug("no answer", consumer=self.consumer.where, seconds=_LOOK_DEADLINE)
        if interval is not None:
            raise MissedHeartbeatError(
                f"{self.consumer.where}: neither message nor heartbeat for "
                f"{_ALARM_AFTER * interval:g} s: the server may be gone, or out of reach"
            )

    async def _check(self) -> None:
        try:
            await self.consumer.check()
        except NatsSourceError as error:
            self._end = error
            raise

    # -- the callback ---------------------------------------------------------------------------

    def serve(self, callback: OnMessage) -> None:
        """Hand every message to ``callback``, one after the other, in a task.

        What ``next`` would raise, and what the callback raises, goes to ``on_error``. Without one,
        and where it ends the subscription anyway, the task ends, and ``unsubscribe``, ``drain`` or
        leaving the context raises it.
        """
        self._task = asyncio.create_task(self._serve(callback))

    async def _serve(self, callback: OnMessage) -> None:
        while True:
            try:
                message = await self._next(None)
            except SubscriptionClosedError:
                return
            except Exception as error:
                if self._on_error is not None:
                    self._on_error(error)
                log.error("no message is handed over", consumer=self.consumer.where, error=error)
                raise
            try:
                await callback(message)
            except Exception as error:  # the user's code may raise anything
                if self._on_error is None:
                    log.error("the callback failed", consumer=self.consumer.where, message=message)
                    raise
                self._on_error(error)

    async def _served(self) -> None:
        """Wait for the callback's task; raise what ended it, unless ``on_error`` has had it."""
        task, self._task = self._task, None
        if task is None or task is asyncio.current_task():
            return
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise  # it is the caller who is cancelled
        except Exception:
            if self._on_error is None:
                raise

    # -- the end --------------------------------------------------------------------------------

    async def unsubscribe(self) -> None:
        """End it at once; delete the consumer if it was created for this subscription.

        What was received and not handed over is dropped. Safe to call again.

        Raises:
            NatsSourceError: the deletion failed, with its reason (ADR-15, "Unsubscribe"); or the
                callback's task had ended with an error.
        """
        if self._closed:
            return
        self._closed = True
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        try:
            await self._arrivals.close()
            await self._served()
        finally:
            await self.consumer.delete()

    async def drain(self) -> None:
        """Receive nothing new, but hand over what has arrived; then delete the consumer.

        With a callback, returns when it has had the last message. Else iterate on: the iteration
        ends after the last message. The consumer is deleted then, so that all can be acknowledged,
        if it was created for this subscription; where that fails, ``on_error`` gets the error, or
        it is raised where there is none.

        Raises:
            ConnectError: the connection was lost before all that was under way had arrived.
        """
        if self._closed or self._sealed:
            return
        await self._arrivals.stop()
        # What the server sent before its PONG has arrived with it.
        alive = await self._connection.alive(_PONG_DEADLINE)
        self._sealed = True
        try:
            await self._arrivals.seal()
        except SlowConsumerError as error:
            self._report(error)
        finally:
            self._arrivals.wake()
        if not alive:
            self._connection.renew()
            raise ConnectError(
                f"{self._connection.settings.places} did not answer while the subscription to "
                f"{self.consumer.where} was drained"
            )
        if self._task is not None:
            await self._served()
        elif not self._arrivals.arrived:
            await self._finish()
