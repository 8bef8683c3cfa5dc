"""The one place that touches private names of nats-py.

nats-py keeps the connection: authentication, TLS, reconnect, discovery, its own subscriptions. This
module stands between its read loop and its parser. Every chunk of received bytes is cut into
frames once; frames of *tapped* subscriptions go to their inboxes as they are, without an object for
each message; all other frames go on to nats-py's parser, whole and in order. So nats-py's parser
never holds half a frame, and may be taken out or put back at any frame's end.

Private names in use, checked by ``tests/test_bridge.py`` against the installed version:
``Client._ps`` (an object with ``parse`` and ``reset``), ``Client._transport`` (with ``close``, and
but for websocket ``_io_writer``, an asyncio stream) and ``Subscription._id`` (the sid).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import numpy as np
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from nats_stream_source.wire.frames import Framer, Frames

MOST_BYTES = 256 << 20  # of an inbox; flow control keeps a consumer at 32 MiB under way


class Inbox:
    """The frames that arrived for one tapped subscription, oldest first.

    It holds what the read loop put in since the last :meth:`take`. Where the reader takes all in
    its own turn, that is what one turn of the event loop reads from the socket; where the reader
    is away for long, flow control makes the server wait. A server without flow control would fill
    the memory: frames beyond ``most_bytes`` are dropped and counted.

    Attributes:
        nbytes: bytes of the frames that wait.
        most_bytes: the most that may wait.
        dropped: how many frames were dropped because more than that would have waited.
    """

    def __init__(self, subscription: Subscription, tap: _Tap) -> None:
        self.nbytes = 0
        self.most_bytes = MOST_BYTES
        self.dropped = 0
        self._subscription = subscription
        self._tap = tap
        self._frames: deque[Frames] = deque()
        self._arrived = asyncio.Event()

    @property
    def sid(self) -> int:
        """The subscription's number on this connection."""
        return int(self._subscription._id)

    def put(self, frames: Frames) -> None:
        """Add frames; wakes :meth:`wait`."""
        if self.nbytes + frames.nbytes > self.most_bytes:
            self.dropped += len(frames)
        else:
            self.nbytes += frames.nbytes
            self._frames.append(frames)
        self._arrived.set()

    def wake(self) -> None:
        """Let :meth:`wait` return though nothing arrived, for the reader to look around."""
        self._arrived.set()

    def take(self) -> list[Frames]:
        """All that has arrived since the last call; never waits."""
        self._arrived.clear()
        taken = list(self._frames)
        self._frames.clear()
        self.nbytes = 0
        return taken

    async def wait(self, timeout: float) -> bool:
        """Wait until something arrived or :meth:`wake`; False when ``timeout`` seconds passed."""
        try:
            await asyncio.wait_for(self._arrived.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """UNSUB; frames still under way go to nats-py, which drops them as of an unknown sid."""
        self._tap.inboxes.pop(self.sid, None)
        self._frames.clear()
        await self._subscription.unsubscribe()


class _Tap:
    """Stands where nats-py has its parser."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._framer = Framer()
        self.inboxes: dict[int, Inbox] = {}

    def reset(self) -> None:
        self._framer.reset()
        self._inner.reset()

    async def parse(self, data: bytes = b"") -> None:
        frames = self._framer.feed(data)
        if not len(frames):
            return
        # Runs of frames with the same owner, in the order of arrival.
        begin = 0
        for stop in [*(np.flatnonzero(np.diff(frames.sid)) + 1).tolist(), len(frames)]:
            inbox = self.inboxes.get(int(frames.sid[begin]))
            if inbox is None:
                await self._inner.parse(frames.buffer[frames.begin[begin] : frames.stop[stop - 1]])
            else:
                inbox.put(frames.select(slice(begin, stop)))
            begin = stop


def tapped_client() -> Client:
    """A new, unconnected nats-py client whose subscriptions can be tapped."""
    client = Client()
    client._ps = _Tap(client._ps)  # type: ignore[assignment]
    return client


def abort(client: Client) -> None:
    """Break the socket off: a client that is not closed reconnects, as after any lost connection.

    Not by ``close()`` where there is a way around: it waits for what was not sent yet, for ever if
    the server does not read.
    """
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
    elif client._transport is not None:
        client._transport.close()  # type: ignore[no-untyped-call]


async def open_inbox(client: Client, subject: str) -> Inbox:
    """Subscribe to ``subject``; its frames come to the returned inbox instead of to nats-py.

    Args:
        client: one of :func:`tapped_client`, connected.
    """
    tap = client._ps
    assert isinstance(tap, _Tap)
    subscription = await client.subscribe(subject)
    inbox = Inbox(subscription, tap)
    tap.inboxes[inbox.sid] = inbox
    return inbox
