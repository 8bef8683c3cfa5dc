"""Buffer of the messages and statuses that a subscription received, in the order of arrival.

Frames stay in a tapped inbox until the caller requests the next item. Only then they become
objects. So a status that the server sends between messages (heartbeat, flow control) is handled
after the messages before it were delivered to the caller, as ADR-15 requires. While the caller
pauses, flow control gets no reply, and the server stops sending. Without flow control the inbox
holds at most ``max_pending_bytes`` and drops later messages, which is an error here. nats-py's
pending limits drop messages without an error
(docs/internals/measurements.md, Servers 7).

Idle time is counted only during :meth:`MessageBuffer.wait`. Time that the caller spends elsewhere
does not count.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

from nats_stream_source.connection.inbox import Inbox
from nats_stream_source.connection.liveness import PONG_TIMEOUT
from nats_stream_source.errors import SlowConsumerError
from nats_stream_source.jetstream.subscriptions.consumer import BoundConsumer
from nats_stream_source.jetstream.subscriptions.message import JsMessage, message_of
from nats_stream_source.wire.consumer.messages import ACK_PREFIX, ConsumerStatus
from nats_stream_source.wire.framing.frames import FrameFields

DEFAULT_PENDING_BYTES = 64 << 20  # twice the largest flow-control window of a server

_ACK_PREFIX = ACK_PREFIX.encode()
_READ_GRACE = 0.02  # seconds, for what a busy event loop left in the socket


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
            return ConsumerStatus.parse(block, reply.decode("utf-8", "surrogateescape"))
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
        self.idle_seconds += loop.time() - started

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
