"""A proxy between client and server that knows frames and does harm on request.

It runs in a thread of its own. For every frame that the server sends, ``verdict(frame)`` decides
whether it passes (True), is dropped (False) or another frame goes in its place (bytes); what the
client sends passes through. ``seen`` records the server's frames and ``dropped`` those that did not
pass, so that a test can assert that its fault really happened.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable

from nats_stream_source.wire.frames import Framer, Frames, Kind

Verdict = Callable[[bytes], bool | bytes]


def is_delivery(frame: bytes) -> bool:
    """Whether a frame is a message that a consumer delivers."""
    return b" $JS.ACK." in frame.split(b"\r\n", 1)[0]


def is_status(frame: bytes, text: bytes) -> bool:
    """Whether a frame is a status message with ``text`` in its description."""
    return frame.startswith(b"HMSG") and b"NATS/1.0 100 " + text in frame


def with_header(frame: bytes, name: bytes, value: bytes) -> bytes:
    """An HMSG frame whose header ``name`` has another value."""
    line, rest = frame.split(b"\r\n", 1)
    *words, header_size, size = line.split(b" ")
    block, payload = rest[: int(header_size)], rest[int(header_size) :]
    block = re.sub(name + rb": [^\r]*", name + b": " + value, block)
    grown = len(block) - int(header_size)
    sizes = [b"%d" % len(block), b"%d" % (int(size) + grown)]
    return b" ".join([*words, *sizes]) + b"\r\n" + block + payload


class Proxy:
    """A loopback proxy to ``port``; a context manager."""

    def __init__(self, port: int, verdict: Verdict | None = None) -> None:
        self._target = port
        self.verdict: Verdict = verdict or (lambda frame: True)
        self.seen: list[bytes] = []
        self.dropped: list[bytes] = []
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def cut(self) -> None:
        """Reset all connections; new ones are served."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, down: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            up, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            to_client.transport.abort()
            return
        self._writers |= {to_client, to_server}
        try:
            await asyncio.gather(self._pass_up(down, to_server), self._pass_down(up, to_client))
        except (OSError, asyncio.CancelledError):
            pass  # either side is gone, or the test is over
        finally:
            for writer in (to_client, to_server):
                self._writers.discard(writer)
                writer.transport.abort()
            self._tasks.discard(task)

    async def _pass_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def _pass_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        framer = Framer()
        while data := await reader.read(65536):
            for frame in self._frames(framer.feed(data)):
                writer.write(frame)
            await writer.drain()
        raise ConnectionResetError

    def _frames(self, frames: Frames) -> list[bytes]:
        passed = []
        for i in range(len(frames)):
            frame = frames.bytes_of(i)
            self.seen.append(frame)
            verdict = frames.kind[i] == Kind.CONTROL or self.verdict(frame)
            if verdict is False:
                self.dropped.append(frame)
            else:
                passed.append(verdict if isinstance(verdict, bytes) else frame)
        return passed
