"""The one place that touches private names of nats-py.

nats-py keeps the connection: authentication, TLS, reconnect, discovery, its own subscriptions. This
module stands between its read loop and its parser. Every chunk of received bytes is cut into
frames once; frames of *tapped* subscriptions go to their inboxes as they are, without an object for
each message; all other frames go on to nats-py's parser, whole and in order. So nats-py's parser
never holds half a frame, and may be taken out or put back at any frame's end.

How it reads. nats-py reads at most 32 KiB at a time, through an asyncio stream that copies
everything twice; cutting so small chunks costs more than all the rest. So as soon as its read loop
runs (the handshake and a TLS upgrade are over), the protocol under the stream is replaced by
:class:`_Reads`, which receives up to a MiB at a time straight into the framer's memory; the
read loop's ``read()`` then only waits for that. Writing stays as it was. Where the transport is not
the one that is known here (websocket, another version of nats-py), chunks are taken as they come.

Private names in use, checked by ``tests/test_bridge.py`` against the installed version:
``Client._ps`` (an object with ``parse`` and ``reset``), ``Client._transport`` (with ``close``, and
but for websocket ``_io_reader`` and ``_io_writer``, an asyncio stream, of which the read loop uses
``read`` and ``at_eof``) and ``Subscription._id`` (the sid).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import nats.errors
import numpy as np
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport

from nats_stream_source.logs import field_logger
from nats_stream_source.wire.frames import Framer, Frames

log = field_logger(__name__)

_MOST_UNREAD = 4 << 20  # bytes received ahead of the read loop; then the server has to wait
_SPARSE = 64  # frames that are less than one part in so many of their block are copied out of it
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
        self._stopped = False
        self._frames: deque[Frames] = deque()
        self._arrived = False
        self._waiting: set[asyncio.Future[bool]] = set()

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
            if self._frames and frames.nbytes * _SPARSE < len(frames.buffer):
                # Few frames that wait long must not keep all that was received with them.
                frames = Frames.join([frames])
            self._frames.append(frames)
        self.wake()

    def wake(self) -> None:
        """Let :meth:`wait` return though nothing arrived, for the reader to look around."""
        self._arrived = True
        for waiting in self._waiting:
            _end(waiting, True)

    def take(self) -> list[Frames]:
        """All that has arrived since the last call; never waits."""
        self._arrived = False
        taken = list(self._frames)
        self._frames.clear()
        self.nbytes = 0
        return taken

    async def wait(self, timeout: float) -> bool:
        """Wait until something arrived or :meth:`wake`; False when ``timeout`` seconds passed."""
        if self._arrived:
            return True
        # Not asyncio.wait_for, which makes a task each time: this runs for every chunk.
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout, _end, waiting, False)
        self._waiting.add(waiting)
        try:
            return await waiting
        finally:
            timer.cancel()
            self._waiting.discard(waiting)

    async def stop(self) -> None:
        """UNSUB; what is under way still comes in, until :meth:`close`."""
        if not self._stopped:
            self._stopped = True
            await self._subscription.unsubscribe()

    async def close(self) -> None:
        """UNSUB; frames still under way go to nats-py, which drops them as of an unknown sid."""
        self._tap.inboxes.pop(self.sid, None)
        self._frames.clear()
        await self.stop()


class _Tap:
    """Stands where nats-py has its parser."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inner: Any = client._ps
        self.inboxes: dict[int, Inbox] = {}
        self.reads = 0
        self._begin()

    def _begin(self) -> None:
        self._framer = Framer()
        self._reads: _Reads | None = None
        self._begun = False

    def reset(self) -> None:
        # With a new framer: the old connection may still receive something while it is closed.
        self._begin()
        self._inner.reset()

    async def parse(self, data: bytes = b"") -> None:
        self.reads += 1
        try:
            await self._parse(data)
        except (OSError, nats.errors.Error):
            raise
        except Exception as error:
            # Bytes that are no frame, or one that nats-py stumbles over (an INFO without JSON, a
            # subject that is not UTF-8). Its read loop would end at this, and the connection go on
            # without it, deaf. As an error of the protocol it makes nats-py connect anew.
            log.warning(
                "the connection is made anew: what was received cannot be read", error=error
            )
            raise nats.errors.ProtocolError from error

    async def _parse(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            data += await self._take_over()
            frames = self._framer.feed(data)
        elif self._reads is None:
            frames = self._framer.feed(data)
        else:
            frames = self._framer.frames()
        if not len(frames):
            return
        # Runs of frames with the same owner, in the order of arrival.
        begin = 0
        for stop in [*(np.flatnonzero(np.diff(frames.sid)) + 1).tolist(), len(frames)]:
            inbox = self.inboxes.get(int(frames.sid[begin]))
            if inbox is None:
                whole = frames.buffer[frames.begin[begin] : frames.stop[stop - 1]]
                await self._inner.parse(bytes(whole))
            else:
                inbox.put(frames.select(slice(begin, stop)))
            begin = stop

    async def _take_over(self) -> bytes:
        """Put :class:`_Reads` under the connection where that is possible; what was read before."""
        transport = self._client._transport
        reader = getattr(transport, "_io_reader", None)
        writer = getattr(transport, "_io_writer", None)
        if (
            type(transport) is not TcpTransport
            or type(reader) is not asyncio.StreamReader
            or type(writer) is not asyncio.StreamWriter
            or writer.transport.is_closing()
            or reader.exception() is not None
            # An end is told once: a connection that has ended stays as it is.
            or getattr(reader, "_eof", True)
        ):
            return b""
        # Nothing can come in between: with its end known, the stream gives what it has at once.
        reader.feed_eof()
        before = await reader.read()
        self._reads = _Reads(self._framer, writer.transport)
        writer.transport.set_protocol(self._reads)
        transport._io_reader = self._reads  # type: ignore[assignment]
        return before


class _Reads(asyncio.BufferedProtocol):
    """Receives into a framer's memory: an asyncio stream's protocol and its reader in one.

    The stream's own protocol stays behind it, since writing waits for what it is told.
    """

    def __init__(self, framer: Framer, transport: asyncio.WriteTransport) -> None:
        self._framer = framer
        self._transport: Any = transport
        self._behind: Any = transport.get_protocol()
        self._unread = 0
        self._paused = self._ended = False
        self._error: Exception | None = None
        self._waiting: asyncio.Future[bool] | None = None

    # -- what nats-py's read loop calls ---------------------------------------------------------

    async def read(self, _most: int) -> bytes:
        """Wait until something was received, which the framer has; or the end. Always ``b""``."""
        if not self._unread and not self._ended:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if not self._unread and self._error is not None:
            raise self._error
        self._unread = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return b""

    def at_eof(self) -> bool:
        """Whether the connection has ended and everything was read; a failure is raised by read."""
        return self._ended and not self._unread and self._error is None

    # -- what the transport calls ---------------------------------------------------------------

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._framer.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._framer.received(nbytes)
        self._unread += nbytes
        if self._unread > _MOST_UNREAD and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool | None:
        self._ended = True
        self._wake()
        # Half open, as the stream keeps it, is nothing that TLS has: asyncio warns of it.
        kept: bool | None = self._behind.eof_received()
        return kept and self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._error = True, exc
        self._wake()
        self._behind.connection_lost(exc)

    def pause_writing(self) -> None:
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        self._behind.resume_writing()

    def _wake(self) -> None:
        if self._waiting is not None:
            _end(self._waiting, True)


def tapped_client() -> Client:
    """A new, unconnected nats-py client whose subscriptions can be tapped."""
    client = Client()
    client._ps = _Tap(client)  # type: ignore[assignment]
    return client


def reads(client: Client) -> int:
    """How often something was received: whether it grows tells a slow line from a dead one."""
    tap = client._ps
    assert isinstance(tap, _Tap)
    return tap.reads


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


async def open_inbox(client: Client, subject: str, queue: str = "") -> Inbox:
    """Subscribe to ``subject``; its frames come to the returned inbox instead of to nats-py.

    Args:
        client: one of :func:`tapped_client`, connected.
        queue: the queue group to be a member of; none if empty.
    """
    tap = client._ps
    assert isinstance(tap, _Tap)
    subscription = await client.subscribe(subject, queue)
    inbox = Inbox(subscription, tap)
    tap.inboxes[inbox.sid] = inbox
    return inbox


def _end(waiting: asyncio.Future[bool], arrived: bool) -> None:
    if not waiting.done():
        waiting.set_result(arrived)
