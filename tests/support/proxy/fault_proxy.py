"""A proxy between client and server that parses frames and injects faults on request.

It runs in a thread of its own. Each frame that the server sends is shown to ``verdict``, each that
the client sends to ``upward``; the verdict is

============  ==============================================================================
``True``      it passes
``False``     it is dropped
``bytes``     this goes in its place
``Twice()``   it comes two times
``Delay(s)``  it, and all that follows in this direction, comes so many seconds later
``After(n)``  it comes when n more messages have passed: the order changes
``CutAt(n)``  its first n bytes come, then both sides see a reset
============  ==============================================================================

A verdict may take its time and do things itself (kill a server, delete a consumer): nothing passes
meanwhile. ``freeze`` lets nothing pass, ``rate`` bounds the bytes a second towards the client,
``cut`` resets all connections. What passed is on record (``seen``, ``dropped``, ``sent``), so that
a test asserts that its fault really happened, and the client's requests: ``asked``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nats_stream_source.wire.framing.frames import Framer
from nats_stream_source.wire.framing.parse import FrameKind
from tests.support.event_loop import Relay


@dataclass(frozen=True, slots=True)
class Twice:
    """The frame comes two times."""


@dataclass(frozen=True, slots=True)
class Delay:
    seconds: float


@dataclass(frozen=True, slots=True)
class After:
    messages: int


@dataclass(frozen=True, slots=True)
class CutAt:
    size: int


Outcome = bool | bytes | Twice | Delay | After | CutAt
Verdict = Callable[[bytes], Outcome]


def _passes(frame: bytes) -> Outcome:
    return True


def is_delivery(frame: bytes) -> bool:
    """Whether a frame is a message that a consumer delivers."""
    return b" $JS.ACK." in frame.split(b"\r\n", 1)[0]


def is_status(frame: bytes, text: bytes) -> bool:
    """Whether a frame is a status message with ``text`` in its description."""
    return frame.startswith(b"HMSG") and b"NATS/1.0 100 " + text in frame


def stream_seq(frame: bytes) -> int:
    """The stream sequence in the ACK subject of a delivery."""
    return int(frame.split(b"\r\n", 1)[0].split(b".")[-4])


def pending(frame: bytes) -> int:
    """How many messages follow a delivery, by its ACK subject."""
    return int(frame.split(b"\r\n", 1)[0].split(b".")[-1].split(b" ")[0])


def consumer_of(frame: bytes) -> str:
    """The name of the consumer that delivers a frame, by its ACK subject."""
    return frame.split(b"\r\n", 1)[0].split(b".")[-6].decode()


def subject_of(frame: bytes) -> str:
    """The subject of a message of either side."""
    return frame.split(b" ", 2)[1].decode()


def with_header(frame: bytes, name: bytes, value: bytes) -> bytes:
    """An HMSG frame whose header ``name`` has another value."""
    line, rest = frame.split(b"\r\n", 1)
    *words, header_size, size = line.split(b" ")
    block, payload = rest[: int(header_size)], rest[int(header_size) :]
    block = re.sub(name + rb": [^\r]*", name + b": " + value, block)
    grown = len(block) - int(header_size)
    sizes = [b"%d" % len(block), b"%d" % (int(size) + grown)]
    return b" ".join([*words, *sizes]) + b"\r\n" + block + payload


class Proxy(Relay):
    """A loopback proxy to ``port``; a context manager.

    Args:
        verdict: what happens to MSG and HMSG of the server; all else of it passes.
        upward: what happens to the client's frames, ``PING`` and ``CONNECT`` too.
        listen: the port to listen on; a free one when 0.
        host: where the server is.
        rate: bytes a second towards the client, on each connection; None for no limit.
        keep: bytes of each frame that are put on record; None for all of it, 0 for no record.

    Attributes:
        seen: all frames of the server; ``dropped``: those of it that did not come as they were.
        sent: all frames of the client; ``withheld``: those of it that did not come as they were.
    """

    def __init__(
        self,
        port: int,
        verdict: Verdict | None = None,
        upward: Verdict | None = None,
        *,
        listen: int = 0,
        host: str = "127.0.0.1",
        rate: float | None = None,
        keep: int | None = None,
    ) -> None:
        super().__init__(port, host, listen)
        self.verdict: Verdict = verdict or _passes
        self.upward: Verdict = upward or _passes
        self.rate = rate
        self.seen: list[bytes] = []
        self.dropped: list[bytes] = []
        self.sent: list[bytes] = []
        self.withheld: list[bytes] = []
        self._keep = keep

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    # -- what a test does and asks ----------------------------------------------------------------

    freeze, thaw = Relay.hold, Relay.release

    def cut(self) -> None:
        """Reset all connections; new ones are served."""
        self._abort()

    def asked(self, prefix: str) -> list[str]:
        """The subjects with ``prefix`` that clients have published to, in order."""
        subjects = [subject_of(f) for f in self.sent if f[:4].upper() in (b"PUB ", b"HPUB")]
        return [subject for subject in subjects if subject.startswith(prefix)]

    @property
    def created(self) -> list[str]:
        asked = self.asked("$JS.API.CONSUMER.CREATE.")
        return [subject.split(".")[5] for subject in asked]

    @property
    def flow_controlled(self) -> list[bool]:
        """Of each requested consumer, whether its configuration has flow control."""
        creations = [frame for frame in self.sent if b"CONSUMER.CREATE" in frame.split(b"\r\n")[0]]
        return [b'"flow_control"' in frame for frame in creations]

    @property
    def deleted(self) -> list[str]:
        asked = self.asked("$JS.API.CONSUMER.DELETE.")
        return [subject.split(".")[5] for subject in asked]

    # -- connections ------------------------------------------------------------------------------

    async def _pass_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        framer, way = Framer(), _Way(writer)
        while data := await reader.read(65536):
            await self._open.wait()
            frames = framer.feed(data)
            for i in range(len(frames)):
                frame = frames.bytes_of(i)
                self._note(self.seen, frame)
                outcome = True if frames.kind[i] == FrameKind.CONTROL else self.verdict(frame)
                if outcome is not True:
                    self._note(self.dropped, frame)
                await way.put(frame, outcome)
            await writer.drain()
            if self.rate is not None:
                await asyncio.sleep(len(data) / self.rate)
        raise ConnectionResetError

    async def _pass_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest, way = b"", _Way(writer)
        while data := await reader.read(65536):
            await self._open.wait()
            frames, rest = client_frames(rest + data)
            for frame in frames:
                self._note(self.sent, frame)
                outcome = self.upward(frame)
                if outcome is not True:
                    self._note(self.withheld, frame)
                await way.put(frame, outcome)
            await writer.drain()
        raise ConnectionResetError

    def _note(self, record: list[bytes], frame: bytes) -> None:
        if self._keep != 0:
            record.append(frame[: self._keep])


class _Way:
    """One direction of one connection: what verdicts mean on it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._late: list[tuple[int, bytes]] = []

    async def put(self, frame: bytes, outcome: Outcome) -> None:
        write = self._writer.write
        if isinstance(outcome, CutAt):
            write(frame[: outcome.size])
            await self._writer.drain()
            raise ConnectionResetError
        if isinstance(outcome, After):
            self._late.append((outcome.messages, frame))
            return
        if isinstance(outcome, Delay):
            await self._writer.drain()
            await asyncio.sleep(outcome.seconds)
        if isinstance(outcome, bytes):
            write(outcome)
        elif outcome is not False:
            write(frame)
        if isinstance(outcome, Twice):
            write(frame)
        for _, late in (one for one in self._late if one[0] <= 1):
            write(late)
        self._late = [(left - 1, late) for left, late in self._late if left > 1]


_PAYLOAD = re.compile(rb"H?PUB .* (\d+)$", re.IGNORECASE)


def client_frames(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole frames of what a client has sent, and the rest, which is not whole yet."""
    frames = list(_client_frames(data))
    return frames, data[sum(map(len, frames)) :]


def _client_frames(data: bytes) -> Iterator[bytes]:
    begin = 0
    while (line_end := data.find(b"\r\n", begin)) >= 0:
        end = line_end + 2
        if found := _PAYLOAD.match(data[begin:line_end]):
            end += int(found[1]) + 2
        if end > len(data):
            return
        yield data[begin:end]
        begin = end
