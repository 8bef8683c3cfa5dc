"""A server that is not NATS: it speaks just enough of the protocol, and sends wrong data.

:class:`Rogue` listens on a loopback address and sends the given greeting. What clients send is
recorded unchanged (``received``), so that a test asserts which secrets were sent. ``script`` is
called for every request, and the server sends what it returns. Without one, the server responds to
PING only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from tests.support.event_loop import ThreadServer

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


class Rogue(ThreadServer):
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
    ) -> None:
        super().__init__(host, port)
        self.greets = greets
        self.script = script
        self.after_pong = after_pong
        self.endless = endless
        self.received: list[bytearray] = []
        self.sent = 0

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def everything(self) -> bytes:
        return b"".join(bytes(one) for one in self.received)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = bytearray()
        self.received.append(mine)
        writer.write(self.greets)
        await self._talk(reader, writer, mine)

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

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await writer.drain()
        self.sent += len(data)


def message(subject: bytes, payload: bytes, sid: int = 1) -> bytes:
    """A MSG frame."""
    return b"MSG %s %d %d\r\n%s\r\n" % (subject, sid, len(payload), payload)
