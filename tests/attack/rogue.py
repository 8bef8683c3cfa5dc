"""A server that is none: it speaks just enough of the protocol, and lies.

:class:`Rogue` listens on a loopback address and greets with what it is told to. What clients send
is recorded as it came (``received``), so that a test asserts what was given away. ``script`` is
called for every request; what it returns is sent as it stands. Without one, nothing is answered
but PING.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

Script = Callable[[bytes, bytes], bytes | None]
"""From a request's subject and its reply subject to the bytes to send."""

INFO: dict[str, Any] = {
    "server_id": "ROGUE",
    "version": "2.15.1",
    "proto": 1,
    "headers": True,
    "max_payload": 1 << 20,
}


def greeting(**fields: Any) -> bytes:
    """An INFO line; a field that is None is left out."""
    info = {name: value for name, value in {**INFO, **fields}.items() if value is not None}
    return b"INFO " + json.dumps(info).encode() + b"\r\n"


class Rogue:
    """The server; a context manager.

    Attributes:
        received: the bytes of each connection, in the order of the connections.
        after_pong: sent behind the first PONG of each connection.
    """

    def __init__(
        self,
        greets: bytes = greeting(),
        script: Script | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        after_pong: bytes = b"",
        endless: bytes = b"",
        hang_up: bool = False,
    ) -> None:
        self.greets = greets
        self.script = script
        self.host, self.port = host, port
        self.after_pong = after_pong
        self.endless = endless
        self.hang_up = hang_up
        self.received: list[bytearray] = []
        self.sent = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def everything(self) -> bytes:
        """All that any client has sent."""
        return b"".join(bytes(one) for one in self.received)

    def __enter__(self) -> Rogue:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        mine = bytearray()
        self.received.append(mine)
        try:
            writer.write(self.greets)
            await self._talk(reader, writer, mine)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client is gone, or the test is over
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _talk(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mine: bytearray
    ) -> None:
        greeted = False
        while True:
            line = await reader.readuntil(b"\r\n")
            mine += line
            words = line.split()
            if words[0] in (b"PUB", b"HPUB"):
                mine += await reader.readexactly(int(words[-1]) + 2)
                reply = words[2] if len(words) - (words[0] == b"HPUB") > 3 else b""
                if self.script is not None:
                    await self._send(writer, self.script(words[1], reply) or b"")
            elif words[0] == b"PING":
                await self._send(writer, b"PONG\r\n")
                if not greeted:
                    greeted = True
                    await self._send(writer, self.after_pong)
                    while self.endless:
                        await self._send(writer, self.endless)
                    if self.hang_up:
                        return

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()
        self.sent += len(data)


def message(subject: bytes, payload: bytes, sid: int = 1) -> bytes:
    """A MSG frame."""
    return b"MSG %s %d %d\r\n%s\r\n" % (subject, sid, len(payload), payload)
