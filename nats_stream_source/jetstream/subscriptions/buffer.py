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
from collections import deque
from collections.abc import Iterator

from nats_stream_source.connection.connection import Connection
from nats_stream_source.connection.inbox import Inbox
from nats_stream_source.errors import SlowConsumerError
from nats_stream_source.jetstream.subscriptions.message import JsMessage
from nats_stream_source.wire.consumer.ack_subject import ACK_PREFIX, AckReply
from nats_stream_source.wire.consumer.status import ConsumerStatus
from nats_stream_source.wire.framing.frames import FrameFields

DEFAULT_PENDING_BYTES = 64 << 20  # twice the largest flow-control window of a server


# Seconds in which the read loop receives what a busy event loop left in the socket.
_READ_GRACE = 0.02


class MessageBuffer:
    """Messages and statuses of one inbox.

    Attributes:
        idle_seconds: seconds of waiting since the last frame was received.
        last_received_at: event loop time at which the last frame was received.
    """

    def __init__(
        self,
        connection: Connection,
        inbox: Inbox,
        *,
        acks: bool,
        max_pending_bytes: int = DEFAULT_PENDING_BYTES,
    ) -> None:
        """Create a buffer; ``acks`` is False if the consumer's messages are not acknowledged."""
        inbox.max_bytes = max_pending_bytes
        self.idle_seconds = 0.0
        self.last_received_at = 0.0
        self._connection = connection
        self._inbox = inbox
        self._acks = acks
        self._chunks: deque[Iterator[FrameFields]] = deque()
        self._queued = 0
        self._dropped = 0

    def next_item(self) -> JsMessage | ConsumerStatus | None:
        """Return the next message or status; None if the buffer is empty.

        Raises:
            ProtocolError: the frame is neither a message nor a status, or is malformed. The frame
                is skipped.
            SlowConsumerError: messages were dropped. Later calls return the remaining messages.
        """
        if not self._queued and not self.collect():
            return None
        self._queued -= 1
        while (frame := next(self._chunks[0], None)) is None:
            self._chunks.popleft()
        return self._parse(*frame)

    def collect(self) -> bool:
        """Move all received frames out of the inbox; return whether the inbox held any."""
        if (dropped := self._inbox.dropped) > self._dropped:
            newly_dropped, self._dropped = dropped - self._dropped, dropped
            raise SlowConsumerError(
                f"{newly_dropped} messages were dropped: {self._inbox.max_bytes} bytes were "
                f"already waiting for the caller; read faster, set flow_control and "
                f"idle_heartbeat or a smaller max_ack_pending in the consumer configuration, or "
                f"increase 'pending_bytes'",
                settings=("pending_bytes",),
            )
        chunks = [chunk for chunk in self._inbox.take() if len(chunk)]
        if chunks:
            self.idle_seconds = 0.0
            self.last_received_at = asyncio.get_running_loop().time()
            self._chunks.extend(chunk.fields() for chunk in chunks)
            self._queued += sum(map(len, chunks))
        return bool(chunks)

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
        """Whether the buffer holds an item."""
        return self._queued > 0 or self._inbox.nbytes > 0

    async def unsubscribe(self) -> None:
        """Send UNSUB. Received frames, and frames still under way, stay available."""
        await self._inbox.stop()

    async def detach(self) -> None:
        """Release the inbox. Received frames stay available."""
        self.collect()
        await self._connection.close_inbox(self._inbox)

    async def close(self) -> None:
        """Release the inbox and drop the remaining frames."""
        self._chunks.clear()
        self._queued = 0
        await self._connection.close_inbox(self._inbox)
        self._inbox.wake()

    def _parse(
        self, subject: bytes, raw_reply: bytes, header_block: bytes, payload: bytes
    ) -> JsMessage | ConsumerStatus:
        reply = raw_reply.decode("utf-8", "surrogateescape")
        if not reply.startswith(ACK_PREFIX):
            return ConsumerStatus.parse(header_block, reply)
        name = subject.decode("utf-8", "surrogateescape")
        return JsMessage(
            self._connection,
            name,
            payload,
            reply,
            header_block,
            acks=self._acks,
            metadata=AckReply.parse(reply),
        )
