"""What arrives for a subscription: messages and statuses, one at a time, in their order.

Frames wait in a tapped inbox until they are asked for, and only then become objects. So what the
server sends between messages (heartbeats, flow control) is looked at when the messages before it
have been handed over, as ADR-15 wants it; a caller who rests leaves flow control unanswered, and
the server waits. Where there is no flow control, the inbox holds ``most_bytes`` and drops the
rest, which is an error here: nats-py's pending limits drop without a sign (DESIGN 3.7).

Silence is counted only while somebody waits: time that the caller spends elsewhere is no silence.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from nats_stream_source.errors import SlowConsumerError
from nats_stream_source.jetstream.bridge import Inbox
from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.message import JsMessage
from nats_stream_source.wire.ack_reply import ACK_PREFIX
from nats_stream_source.wire.frames import Frames
from nats_stream_source.wire.status import Status

MOST_BYTES = 64 << 20  # twice what a server with flow control has under way at most

_Pieces: TypeAlias = tuple[bytes, bytes, bytes, bytes]

_GRACE = 0.02  # seconds in which the read loop gets at what a busy event loop has left in sockets


class Arrivals:
    """The arrivals of one inbox.

    Attributes:
        silence: seconds waited since something arrived.
        heard: the event loop's time when something arrived last.
    """

    def __init__(
        self, connection: Connection, inbox: Inbox, *, acks: bool, most_bytes: int = MOST_BYTES
    ) -> None:
        """``acks`` is False where messages are not to be acknowledged."""
        inbox.most_bytes = most_bytes
        self.silence = 0.0
        self.heard = 0.0
        self._connection = connection
        self._inbox = inbox
        self._acks = acks
        self._runs: deque[Iterator[_Pieces]] = deque()
        self._taken = 0
        self._dropped = 0

    def __repr__(self) -> str:
        return f"<Arrivals {self._taken} taken, {self._inbox.nbytes} bytes wait>"

    def pop(self) -> JsMessage | Status | None:
        """The next message or status; None when nothing has arrived.

        Raises:
            ProtocolError: something that is neither, or cannot be read; it is passed over.
            SlowConsumerError: messages were dropped. What is left of them comes next.
        """
        if not self._taken and not self.take():
            return None
        self._taken -= 1
        while (frame := next(self._runs[0], None)) is None:
            self._runs.popleft()
        return self._read(*frame)

    def take(self) -> bool:
        """Take all that has arrived out of the inbox; whether there was anything."""
        if (dropped := self._inbox.dropped) > self._dropped:
            lost, self._dropped = dropped - self._dropped, dropped
            raise SlowConsumerError(
                f"{lost} messages were dropped: {self._inbox.most_bytes} bytes waited for the "
                f"caller already. Read faster, give the consumer flow_control and idle_heartbeat "
                f"or a smaller max_ack_pending, or allow more with pending_bytes"
            )
        runs = [run for run in self._inbox.take() if len(run)]
        if runs:
            self.silence = 0.0
            self.heard = asyncio.get_running_loop().time()
            self._runs.extend(map(_pieces, runs))
            self._taken += sum(map(len, runs))
        return bool(runs)

    async def wait(self, timeout: float) -> None:
        """Wait until something arrives or the inbox is woken, at most ``timeout`` seconds."""
        if timeout <= 0:
            await asyncio.sleep(0)  # or a caller that polls would never let the read loop run
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        if not await self._inbox.wait(timeout):
            await asyncio.sleep(_GRACE)
        self.silence += loop.time() - began

    def wake(self) -> None:
        """Let :meth:`wait` return."""
        self._inbox.wake()

    @property
    def arrived(self) -> bool:
        """Whether there is something to pop."""
        return self._taken > 0 or self._inbox.nbytes > 0

    async def stop(self) -> None:
        """UNSUB; what has arrived, and what is under way, can still be popped."""
        await self._inbox.stop()

    async def seal(self) -> None:
        """End the subscription; what has arrived can still be popped."""
        self.take()
        await self._connection.release(self._inbox)

    async def close(self) -> None:
        """End the subscription; what was not popped is dropped."""
        self._runs.clear()
        self._taken = 0
        await self._connection.release(self._inbox)
        self._inbox.wake()

    def _read(
        self, subject: bytes, raw_reply: bytes, block: bytes, payload: bytes
    ) -> JsMessage | Status:
        reply = raw_reply.decode("utf-8", "surrogateescape")
        if not reply.startswith(ACK_PREFIX):
            return Status.parse(block, reply)
        name = subject.decode("utf-8", "surrogateescape")
        return JsMessage(self._connection, name, payload, reply, block, acks=self._acks)


def _pieces(frames: Frames) -> Iterator[_Pieces]:
    """Subject, reply subject, header block and payload of each frame."""
    buffer = frames.buffer
    # Lists first: taking single numbers out of arrays would cost more than all the rest.
    for a, b, c, d, e, f, g in zip(
        frames.subject_begin.tolist(),
        frames.subject_end.tolist(),
        frames.reply_begin.tolist(),
        frames.reply_end.tolist(),
        frames.header_begin.tolist(),
        frames.payload_begin.tolist(),
        frames.payload_end.tolist(),
        strict=True,
    ):
        yield bytes(buffer[a:b]), bytes(buffer[c:d]), bytes(buffer[e:f]), bytes(buffer[f:g])
