"""Taps the bytes that a nats-py client receives, before its parser; writes frames to its socket.

nats-py keeps the connection: authentication, TLS, reconnect, server discovery, its own
subscriptions. The tap stands between its read loop and its parser. It cuts every chunk of received
bytes into frames once. Frames of *tapped* subscriptions go to their inboxes unchanged, without an
object per message; all other frames go on to nats-py's parser, whole and in order. So nats-py's
parser never holds half a frame, and can be replaced at the end of any frame.

nats-py reads at most 32 KiB at a time, through an asyncio stream that copies everything twice;
cutting such small chunks costs more than all other work. So as soon as the read loop runs (the
handshake and a TLS upgrade are complete), :class:`_BufferedReader` replaces the protocol under the
stream. It receives up to two MiB at a time directly into the framer's memory. Deliveries of one
consumer, the usual content of a large read, go to their inbox within the transport's call; the read
loop's ``read()`` waits for other frames. Writing is unchanged. If the transport is not the known
one (websocket, another version of nats-py), the tap takes chunks as they arrive.

A read costs as much as hundreds of small frames. While an inbox receives small frames by reads of
its sizes ``accumulate``, the tap waits ``_ACCUMULATE`` seconds after each, in which more bytes
arrive in the socket. Responses to requests wait too, so inboxes of short ranges and of watches have
no such sizes.

nats-py publishes one message per call. This module passes many frames to the socket at once, after
the commands that nats-py has buffered. asyncio buffers what the socket does not accept, so the
caller bounds the bytes that it has in flight; a websocket needs ``drain``, which sends.

:meth:`SocketWriter.buffer` adds one frame to nats-py's buffer, as ``Client.publish`` does, at a
third of its cost: the caller has checked subject and headers.

Private names of nats-py in use, verified by
``tests/integration/jetstream/connection/test_socket_tap.py``: ``Client._ps`` (an object with
``parse``, ``reset`` and ``buf``), ``Client._subs`` (the subscriptions by sid),
``Client._transport`` (with ``close``, ``write``, ``writelines`` and ``drain``, and except for
websocket ``_io_reader`` and ``_io_writer``, an asyncio stream, of which the read loop uses ``read``
and ``at_eof``), ``Subscription._id`` (the sid); and for writing ``Client._pending``,
``Client._pending_data_size``, ``Client._max_pending_size``, ``Client._flush_queue`` and
``Client._flush_pending``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import nats.errors
import numpy as np
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.protocol.parser import ERR_RE

from nats_stream_source.connection.inbox import NEVER, Inbox
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.framing.frames import Framer, Frames

log = field_logger(__name__)

_MAX_UNREAD = 4 << 20  # bytes received ahead of the read loop; then reading is paused
_ACCUMULATE = 0.003  # seconds
_SMALL_FRAME = 4 << 10  # bytes; larger frames cost more than the reads that bring them


class _Tap:
    """Replaces the parser of a nats-py client, and passes other frames on to it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._parser: Any = client._ps
        self.inboxes: dict[int, Inbox] = {}
        self.reads = 0
        self._reset()

    def _reset(self) -> None:
        self._framer = Framer()
        self._buffered: _BufferedReader | None = None
        self._started = False
        self._received: deque[Frames] = deque()  # for the read loop, and in its hands
        self._failure: Exception | None = None

    def reset(self) -> None:
        # With a new framer: the old connection may still receive bytes while it closes.
        self._reset()
        self._parser.reset()

    async def parse(self, data: bytes = b"") -> None:
        self.reads += 1
        try:
            await self._parse(data)
        except (OSError, nats.errors.ProtocolError):
            raise
        except Exception as error:
            # Invalid frames, or frames that nats-py cannot process (an invalid INFO, a subject that
            # is not UTF-8). They would end nats-py's read loop, and the connection would stay
            # open without it. A protocol error makes nats-py reconnect.
            log.warning("reconnecting: received bytes could not be parsed", error=error)
            raise nats.errors.ProtocolError from error

    async def _parse(self, data: bytes) -> None:
        if not self._started:
            self._started = True
            data += await self._install_reader()
            await self._dispatch(self._framer.feed(data))
        elif self._buffered is None:
            await self._dispatch(self._framer.feed(data))
        else:
            received = self._received  # a reset during the dispatch replaces it
            while received:
                await self._dispatch(received[0])
                received.popleft()
            if self._failure is not None:
                raise self._failure

    def deliver(self, buffered: _BufferedReader) -> bool:
        """Find the frames of a read; returns whether the read loop is not needed for them.

        The read loop needs another turn of the event loop and a task's switch. So deliveries are
        put into their inbox here, unless the read loop has earlier frames.
        """
        if buffered is not self._buffered or self._failure is not None:
            return False  # the connection is an old one, or about to be one
        try:
            frames = self._framer.frames()
        # Any exception: it is that of the read loop, which reconnects (see parse). Here it would
        # end the transport only.
        except Exception as error:
            self._failure = error
            return False
        inbox = self.inboxes.get(int(frames.sid[0])) if frames.in_sequence else None
        if self._received or (inbox is None and len(frames)):
            self._received.append(frames)
            return False
        self.reads += 1
        if inbox is not None:
            inbox.put(frames)
            buffered.accumulate(len(frames), inbox.accumulate)
        return True

    async def _dispatch(self, frames: Frames) -> None:
        """Put frames into their inboxes; pass the others on to nats-py's parser."""
        if not len(frames):
            return
        # Consecutive frames with the same sid, in the order in which they were received.
        start = 0
        accumulate = NEVER
        sids, borders = frames.sid, []
        if not frames.in_sequence and sids.min() != sids.max():
            borders = (np.flatnonzero(np.diff(sids)) + 1).tolist()
        for stop in [*borders, len(frames)]:
            sid = int(frames.sid[start])
            inbox = self.inboxes.get(sid)
            if inbox is not None:
                inbox.put(frames.select(slice(start, stop)) if borders else frames)
                accumulate = inbox.accumulate
            elif sid < 0 or sid in self._client._subs:
                whole = frames.buffer[frames.begin[start] : frames.stop[stop - 1]]
                await self._parser.parse(bytes(whole))
            # Other frames were in flight when their subscription ended. nats-py would parse and
            # drop them, one by one: up to 32 MiB of a consumer of which a part was read.
            start = stop
        if self._buffered is not None:
            self._buffered.accumulate(len(frames), accumulate)

    async def _install_reader(self) -> bytes:
        """Install :class:`_BufferedReader` if possible; returns the bytes that were read before."""
        transport = self._client._transport
        reader = getattr(transport, "_io_reader", None)
        writer = getattr(transport, "_io_writer", None)
        if (
            type(transport) is not TcpTransport
            or type(reader) is not asyncio.StreamReader
            or type(writer) is not asyncio.StreamWriter
            or writer.transport.is_closing()
            or reader.exception() is not None
            # EOF is reported once: a connection that has ended keeps its stream.
            or getattr(reader, "_eof", True)
        ):
            return b""
        # No other task runs in between: after EOF the stream returns its buffer at once.
        reader.feed_eof()
        before = await reader.read()
        self._buffered = _BufferedReader(self._framer, writer.transport, self.deliver)
        writer.transport.set_protocol(self._buffered)
        transport._io_reader = self._buffered  # type: ignore[assignment]
        return before


class _BufferedReader(asyncio.BufferedProtocol):
    """Receives into a framer's memory: protocol and reader of an asyncio stream in one.

    The stream's own protocol stays behind it, since writing waits for that protocol's events.

    Args:
        deliver: called after each read; returns whether :meth:`read` need not return for it.
    """

    def __init__(
        self,
        framer: Framer,
        transport: asyncio.WriteTransport,
        deliver: Callable[[_BufferedReader], bool],
    ) -> None:
        self._framer = framer
        self._deliver = deliver
        self._transport: Any = transport
        self._behind: Any = transport.get_protocol()
        self._unread = self._taken = 0
        self._paused = self._ended = False
        self._accumulating: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self._waiting: asyncio.Future[bool] | None = None

    # -- what nats-py's read loop calls ---------------------------------------------------------

    async def read(self, _limit: int) -> bytes:
        """Wait for frames that ``deliver`` left, or for EOF. Returns ``b""`` always."""
        if not self._unread and not self._ended:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if not self._unread and self._error is not None:
            raise self._error
        self._taken, self._unread = self._unread, 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return b""

    def accumulate(self, frames: int, sizes: range) -> None:
        """Leave the next bytes in the socket for a moment, if the last read has one of the sizes.

        Args:
            frames: the number of frames of that read.
        """
        worthwhile = self._taken in sizes and self._taken < frames * _SMALL_FRAME
        if worthwhile and not self._paused and self._accumulating is None:
            self._transport.pause_reading()
            loop = asyncio.get_running_loop()
            self._accumulating = loop.call_later(_ACCUMULATE, self._accumulated)

    def _accumulated(self) -> None:
        self._accumulating = None
        if not self._paused:
            self._transport.resume_reading()

    def at_eof(self) -> bool:
        """Whether the connection has ended and all bytes were read; read raises a failure."""
        return self._ended and not self._unread and self._error is None

    # -- what the transport calls ---------------------------------------------------------------

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._framer.room()

    def buffer_updated(self, nbytes: int) -> None:
        self._framer.received(nbytes)
        if not self._unread:
            self._taken = nbytes
        if self._deliver(self):
            return
        self._unread += nbytes
        if self._unread > _MAX_UNREAD and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool | None:
        self._ended = True
        self._wake()
        # The stream stays half open, which TLS does not support: asyncio would warn.
        kept: bool | None = self._behind.eof_received()
        return kept and self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended, self._error = True, exc
        if self._accumulating is not None:
            self._accumulating.cancel()
        self._wake()
        self._behind.connection_lost(exc)

    def pause_writing(self) -> None:
        self._behind.pause_writing()

    def resume_writing(self) -> None:
        self._behind.resume_writing()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(True)


def tapped_client() -> Client:
    """A new, unconnected nats-py client whose subscriptions can be tapped."""
    client = Client()
    client._ps = _Tap(client)  # type: ignore[assignment]
    return client


def read_count(client: Client) -> int:
    """Number of reads of the socket; it grows on a slow line and not on a dead one."""
    tap = client._ps
    assert isinstance(tap, _Tap)
    return tap.reads


def error_as_sent(client: Client) -> str | None:
    """The server's error that nats-py is processing, in the letters in which it was sent.

    nats-py passes it on in lower case, and subjects are case-sensitive. None for an error that
    nats-py read before its parser ran.
    """
    tap = client._ps
    assert isinstance(tap, _Tap)
    found = ERR_RE.match(tap._parser.buf)
    return found[1].decode() if found and found[1] else None


def abort(client: Client) -> None:
    """Abort the socket: a client that is not closed reconnects, as after any lost connection.

    ``close()`` is the fallback only: it waits for unsent bytes, for ever if the server does not
    read.
    """
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
    elif client._transport is not None:
        client._transport.close()  # type: ignore[no-untyped-call]


async def open_inbox(client: Client, subject: str, queue: str = "") -> Inbox:
    """Subscribe to ``subject``; its frames go to the returned inbox instead of to nats-py.

    Args:
        client: a connected client of :func:`tapped_client`.
        queue: the queue group to join; none if empty.
    """
    tap = client._ps
    assert isinstance(tap, _Tap)
    subscription = await client.subscribe(subject, queue)
    return Inbox(subscription._id, subscription.unsubscribe, tap.inboxes)


class SocketWriter:
    """Writes frames to the socket of ``client``."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def write(self, frames: memoryview) -> None:
        """Write whole frames; OSError if the client is not connected, or the socket is broken."""
        client = self._client
        transport: Any = client._transport
        if transport is None or not client.is_connected:
            raise ConnectionError("not connected")
        try:
            if client._pending_data_size > 0:
                commands, client._pending, client._pending_data_size = client._pending, [], 0
                transport.writelines(commands)
            transport.write(frames)
            if not isinstance(transport, TcpTransport):
                await transport.drain()
        except (nats.errors.Error, RuntimeError, AttributeError) as error:
            # RuntimeError, AttributeError: asyncio's transport was lost while nats-py still has it.
            raise ConnectionError(str(error) or type(error).__name__) from error

    def buffer(self, frame: bytes) -> bool:
        """Add a frame to nats-py's buffer; returns whether :meth:`flush` must be awaited.

        Raises:
            nats.errors.Error: the client is closed, or is not connected and its buffer is full.
        """
        client = self._client
        if client.is_closed:
            raise nats.errors.ConnectionClosedError
        size = client._pending_data_size + len(frame)
        full = 0 < client._max_pending_size < size
        if full and not client.is_connected:
            raise nats.errors.OutboundBufferLimitError
        client._pending.append(frame)
        client._pending_data_size = size
        return full or client._flush_queue is None or client._flush_queue.empty()

    async def flush(self) -> None:
        """Wake nats-py's flusher; wait for it while its buffer is full."""
        client = self._client
        await client._flush_pending(
            force_flush=client._pending_data_size > client._max_pending_size > 0
        )
