"""The received frames of one subscription, without an object for each message.

``connection/nats_py/socket_tap.py`` receives the frames.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from nats_stream_source.wire.framing.frames import Frames

MAX_BYTES = 256 << 20  # of an inbox; flow control limits a consumer to 32 MiB in flight
NEVER, AFTER_MEDIUM, AFTER_EACH = range(0), range(16 << 10, 1 << 20), range(1, 1 << 20)
"""Sizes of a read of the socket, in bytes, after which more bytes are worth waiting for."""

_SPARSE = 64  # frames that fill less than 1/64 of their block are copied out of it


class Inbox:
    """The received frames of one tapped subscription, oldest first.

    It holds the frames since the last :meth:`take`. If the reader takes them in every turn of the
    event loop, that is one read of the socket; if the reader pauses, flow control makes the server
    wait. Without flow control the frames would fill the memory: those beyond ``max_bytes`` are
    dropped and counted.

    Args:
        sid: the subscription id on this connection.
        unsubscribe: sends UNSUB.
        inboxes: the open inboxes of the connection by sid, among them this one until it is closed.

    Attributes:
        nbytes: size of the buffered frames.
        max_bytes: limit of ``nbytes``.
        dropped: number of frames that were dropped because of the limit.
        accumulate: after reads of these sizes, the next one waits: throughput counts more than the
            delay of a frame.
    """

    def __init__(
        self, sid: int, unsubscribe: Callable[[], Awaitable[None]], inboxes: dict[int, Inbox]
    ) -> None:
        self.sid = sid
        self.nbytes = 0
        self.max_bytes = MAX_BYTES
        self.dropped = 0
        self.accumulate = NEVER
        self._unsubscribe = unsubscribe
        self._inboxes = inboxes
        self._stopped = False
        self._frames: deque[Frames] = deque()
        self._arrived = False
        self._waiting: set[asyncio.Future[bool]] = set()
        inboxes[sid] = self

    def put(self, frames: Frames) -> None:
        """Add frames; wakes :meth:`wait`."""
        if self.nbytes + frames.nbytes > self.max_bytes:
            self.dropped += len(frames)
        else:
            self.nbytes += frames.nbytes
            if self._frames and frames.nbytes * _SPARSE < len(frames.buffer):
                # A few frames that stay buffered must not keep their whole block in memory.
                frames = Frames.join([frames])
            self._frames.append(frames)
        self.wake()

    def wake(self) -> None:
        """Let :meth:`wait` return without a frame, so that the reader checks its state."""
        self._arrived = True
        for waiting in self._waiting:
            _resolve(waiting, True)

    def take(self) -> list[Frames]:
        """All frames since the last call; never waits."""
        self._arrived = False
        taken = list(self._frames)
        self._frames.clear()
        self.nbytes = 0
        return taken

    async def wait(self, timeout: float) -> bool:
        """Wait for a frame or :meth:`wake`; returns False after ``timeout`` seconds."""
        if self._arrived:
            return True
        # Not asyncio.wait_for, which creates a task per call: this runs for every chunk.
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout, _resolve, waiting, False)
        self._waiting.add(waiting)
        try:
            return await waiting
        finally:
            timer.cancel()
            self._waiting.discard(waiting)

    async def stop(self) -> None:
        """UNSUB; frames in flight are still received, until :meth:`close`."""
        if not self._stopped:
            self._stopped = True
            await self._unsubscribe()

    async def close(self) -> None:
        """UNSUB; frames in flight are dropped because of their unknown sid."""
        self._inboxes.pop(self.sid, None)
        self._frames.clear()
        await self.stop()


def _resolve(waiting: asyncio.Future[bool], arrived: bool) -> None:
    if not waiting.done():
        waiting.set_result(arrived)
