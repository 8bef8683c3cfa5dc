"""An ordered subscription (ADR-15, "Ordered Consumers"): every message once, in stream order.

It uses :class:`OrderedReader`, which re-creates the consumer after the last delivered message when
it detects a gap, missed heartbeats or a reconnect. So the subscription has neither alarms nor
acknowledgements nor a consumer to bind to. Failures that the reader cannot recover from are raised:
ConsumerLostError, DataLossError, MinLastSequenceError, ConnectError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from nats_stream_source.aio.tasks import TimedLock, run_to_completion
from nats_stream_source.errors import NextTimeoutError, SubscriptionClosedError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumers import temporary_consumer
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import ENDLESS, RangeRequest
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.subscriptions.message import JsMessage, message_of
from nats_stream_source.jetstream.subscriptions.validation import SubscribeRequest
from nats_stream_source.wire.consumer.deliveries import Deliveries
from nats_stream_source.wire.framing.frames import FrameFields

_HEARTBEAT = 0.5  # seconds


async def build_range_request(
    jetstream: JetStream,
    stream: str,
    request: SubscribeRequest,
    min_last_seq: int | None,
    timeout: float,
) -> RangeRequest:
    """The range that an ordered reader reads for a validated request with ``ordered``.

    The stream leader determines the start sequence once, for every deliver policy, so that a
    re-created consumer can resume from the last delivered message.
    """
    config = request.config
    info = await jetstream.stream_info(stream)
    filters = config.filter_subjects or ()
    if not filters and (subject := config.filter_subject or request.subject):
        filters = (subject,)
    policy = config.deliver_policy or "all"
    start = 0
    if policy == "new":
        start = info.last_seq
    elif policy == "by_start_sequence":
        start = max(config.opt_start_seq or 1, 1) - 1
    elif policy not in ("all", "last_per_subject"):
        # The info of a consumer with that policy contains the sequence before its first message.
        opt = {name: value for name, value in config.json().items() if name.startswith("opt_start")}
        async with temporary_consumer(
            jetstream, stream, "place", filters, deliver_policy=policy, **opt
        ) as consumer:
            start = consumer.stream_seq
    reach = min_last_seq
    if policy == "last_per_subject":
        filters = filters or (">",)  # servers require a filter for this policy (10094)
        # The end of the initial values. A consumer that is re-created after it must also
        # deliver messages that are no longer the last of their subject.
        reach = max(info.last_seq, min_last_seq or 0)
    return RangeRequest(
        stream=stream,
        known=KnownStream.of(info),
        start=start,
        end=ENDLESS,
        filters=filters,
        last_per_subject=policy == "last_per_subject",
        headers_only=bool(config.headers_only),
        eager=True,
        at_leader=min_last_seq is not None,
        min_last_seq=reach,
        heartbeat=config.idle_heartbeat or _HEARTBEAT,
        catch_up_timeout=timeout,
    )


class OrderedSubscription:
    """An ordered subscription; async iterator and async context manager.

    Attributes:
        reader: the ordered reader; its ``cursor`` shows the position and why consumers were
            re-created.
    """

    def __init__(self, jetstream: JetStream, request: RangeRequest) -> None:
        self.reader = OrderedReader(SharedConnection(jetstream.connection), request)
        self._connection = jetstream.connection
        self._batches = self.reader.batches()
        self._received: Iterator[FrameFields] = iter(())
        self._lock = TimedLock()
        self._read_task: asyncio.Future[Deliveries] | None = None
        self._failure: Exception | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<OrderedSubscription {self.reader.request.stream} {state} {self.reader.cursor!r}>"

    async def next(self, timeout: float | None = None) -> JsMessage:
        """Return the next message; wait at most ``timeout`` seconds, or without limit for None.

        Raises:
            NextTimeoutError: no message was received in time.
            SubscriptionClosedError: the subscription was closed.
            ConsumerLostError, DataLossError, MinLastSequenceError, ConnectError: see the module.
        """
        # Unless other tasks wait for a message.
        if not self._lock.locked() and (message := self._next_received()) is not None:
            return message
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        if not await self._lock.acquire(timeout):
            raise self._timeout_error()
        try:
            while (message := self._next_received()) is None:
                remaining = None if deadline is None else deadline - loop.time()
                self._received = (await self._read_batch(remaining)).fields()
            return message
        finally:
            self._lock.release()

    def _next_received(self) -> JsMessage | None:
        # The reader has verified the reply's numbers, so its metadata can be parsed later.
        frame = next(self._received, None)
        return None if frame is None else message_of(self._connection, frame, acks=False)

    async def _read_batch(self, timeout: float | None) -> Deliveries:
        # A separate task that survives a cancelled or timed-out wait: cancelling a generator while
        # it runs ends it, and that would end the subscription.
        if self._failure is not None:
            raise self._failure
        if self._read_task is None and not self._closed:
            self._read_task = asyncio.ensure_future(anext(self._batches))
        if (task := self._read_task) is not None:
            await asyncio.wait({task}, timeout=timeout)
            if not task.done():
                raise self._timeout_error()
            self._read_task = None
            try:
                return task.result()
            except (asyncio.CancelledError, StopAsyncIteration):
                pass  # unsubscribe was called in another task
            except Exception as error:
                self._failure = error  # later calls raise it again: it is not an end of data
                raise
        raise SubscriptionClosedError(f"could not read from {self!r}: it was unsubscribed")

    def _timeout_error(self) -> NextTimeoutError:
        return NextTimeoutError(
            f"no message received from {self!r} in time; call again or increase 'timeout'",
            settings=("timeout",),
        )

    def __aiter__(self) -> OrderedSubscription:
        return self

    async def __anext__(self) -> JsMessage:
        try:
            return await self.next()
        except SubscriptionClosedError:
            raise StopAsyncIteration from None

    async def unsubscribe(self) -> None:
        """Close the subscription and delete the consumer. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        await run_to_completion(self._close_reader())

    async def _close_reader(self) -> None:
        task = self._read_task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._batches.aclose()

    async def __aenter__(self) -> OrderedSubscription:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.unsubscribe()
