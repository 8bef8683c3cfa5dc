"""Framing: streams cut at every byte, invalid frames, other parsers; the state of a framer."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from nats.protocol.parser import Parser

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.framing import parse as definition, scanner
from nats_stream_source.wire.framing.frames import Framer
from tests.unit.wire.reference.parser import Frame, NotNatsError, parse
from tests.unit.wire.reference.streams import (
    ACK,
    STREAMS,
    cut_at,
    feed_all,
    msg,
    random_settings,
    random_streams,
    seen,
    using,
)

NO_FRAMES = {
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n",
    "lower case": b"msg a 1 0\r\n\r\n",
    "empty line": b"\r\n",
    "no CR": b"PING\n",
    "more than the word": b"PINGS\r\n",
    "INFO of nothing": b"INFO  \r\n",
    "-ERR of nothing": b"-ERR \r\n",
    "-ERR without quotes": b"-ERR bad\r\n",
    "no length": b"MSG a 1\r\n",
    "sid is no number": b"MSG a x 1\r\nx\r\n",
    "sid too large": b"MSG a 9223372036854775808 1\r\nx\r\n",
    "length is no number": b"MSG a 1 r 1x\r\nx\r\n",
    "length is negative": b"MSG a 1 -1\r\nx\r\n",
    "length too large": b"MSG a 1 2147483648\r\n",
    "length of 5000 digits": b"MSG a 1 " + b"9" * 5000 + b"\r\n",
    "too many words": b"MSG a 1 r 1 1\r\nx\r\n",
    "space at the end": b"MSG a 1 1 \r\nx\r\n",
    "other white space": b"MSG\x0ba 1 1\r\nx\r\n",
    "LF only": b"MSG a 1 1\nx\r\n",
    "payload longer than said": b"MSG a 1 1\r\nxyz\r\n",
    "payload without CR": b"MSG a 1 1\r\nx\n\n",
    "more headers than bytes": b"HMSG a 1 5 4\r\nabcd\r\n",
    "HMSG with one number": b"HMSG a 1 4\r\nabcd\r\n",
    # Lines that differ from a message line in one byte.
    "sid and another byte": b"MSG a 1\x01r 1\r\nx\r\n",
    "length after another byte": b"MSG a 1 r\x011\r\nx\r\n",
    "header length after another byte": b"HMSG a 1 r\x010 1\r\nx\r\n",
    "TAB for CR": b"MSG a 1 1\t\nx\r\n",
    "CR before its place": b"MSG a 1 1\rz\nx\r\n",
    "another word of four letters": b"XMSG a 1 0 1\r\nx\r\n",
    "another first letter": b"NSG a 1 1\r\nx\r\n",
    "a longer word": b"MSGX a 1 0 1\r\nx\r\n",
    "another byte for CR after the payload": b"MSG a 1 1\r\nyx\n",
    "another byte for LF after the payload": b"MSG a 1 1\r\ny\rx",
    "header length with a colon for 10": b"HMSG a 1 : 12\r\n123456789012\r\n",
    "length with a colon for 10": b"MSG a 1 :\r\n1234567890\r\n",
    "sid with a colon for 10": b"MSG a : 1\r\nx\r\n",
    "no subject": b"MSG  1 1\r\nx\r\n",
    "empty length": b"MSG a 1 r \r\n\r\n",
    "nothing after a payload's CR": b"MSG a 1 3\r\nab\r\nPING\r\n",
}


@pytest.fixture(params=scanner.available())
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


@pytest.mark.parametrize("name", STREAMS)
def test_cut_at_every_byte(name: str, way: str) -> None:
    stream = STREAMS[name]
    expected, rest = parse(stream)
    assert (bool(expected), rest) == (True, b"")
    for place in range(len(stream) + 1):
        framer = Framer()
        found = seen(framer.feed(stream[:place]))
        done, rest = parse(stream[:place])
        assert found == done
        assert framer.pending == len(rest)
        assert found + seen(framer.feed(stream[place:])) == expected, place
        assert framer.pending == 0


def test_streams_in_sequence(way: str) -> None:
    stream = b"".join(STREAMS.values()) * 20
    found = feed_all([stream])
    assert found == parse(stream)[0]
    assert b"".join(frame.raw for frame in found) == stream


@pytest.mark.parametrize("name", NO_FRAMES)
def test_frame_missing(name: str, way: str) -> None:
    with pytest.raises(NotNatsError):
        parse(NO_FRAMES[name])
    for before in (b"", msg(b"a", 1, b"x", ACK) * 3, msg(b"a", 1, b"x") * 200):
        framer = Framer()
        with pytest.raises(ProtocolError):
            framer.feed(before + NO_FRAMES[name] + msg(b"a", 1, b"x") * 3)


class NatsPyClient:
    """The client methods that nats-py's parser calls."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, bytes, bytes, bytes, bytes]] = []
        self.others = 0

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, payload: bytes, header: bytes | None
    ) -> None:
        self.messages.append((sid, subject, reply, header or b"", payload))

    async def _other(self, *_: object) -> None:
        self.others += 1

    _process_err = _process_ping = _process_pong = _process_info = _other


@pytest.mark.parametrize("name", STREAMS)
def test_nats_py_parses_equal_messages(name: str) -> None:
    client = NatsPyClient()
    asyncio.run(Parser(client).parse(STREAMS[name]))
    found = feed_all([STREAMS[name]])
    assert client.messages == [
        (f.sid, f.subject, f.reply, f.header, f.payload) for f in found if f.kind != "CONTROL"
    ]
    controls = [f for f in found if f.kind == "CONTROL" and not f.raw.startswith(b"+OK")]
    assert client.others == len(controls)


ways = st.sampled_from(scanner.available())


@random_settings
@given(stream=random_streams, way=ways, data=st.data())
def test_streams_in_random_chunks(stream: bytes, way: scanner.Scanner, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    expected, rest = parse(stream)
    assert rest == b""
    with using(way):
        assert feed_all(cut_at(stream, places)) == expected


def test_failure_lasts_until_reset() -> None:
    framer = Framer()
    with pytest.raises(ProtocolError, match="invalid NATS frame: unknown control line b'HELO'"):
        framer.feed(b"HELO\r\n")
    with pytest.raises(ProtocolError, match="reconnect"):
        framer.feed(b"PING\r\n")
    framer.reset()
    assert len(framer.feed(b"PING\r\n")) == 1


def test_error_shows_neither_info_nor_payload() -> None:
    for stream in (b"MSG a 1 1\r\nsecret\r\n", b"INFO \vsecret\r\n"):
        with pytest.raises(ProtocolError) as caught:
            Framer().feed(stream)
        assert "secret" not in str(caught.value)


def test_reset_drops_tail() -> None:
    framer = Framer()
    assert len(framer.feed(b"MSG a 1 50\r\nabc")) == 0
    assert framer.pending == 15
    framer.reset()
    assert framer.pending == 0
    assert seen(framer.feed(b"PING\r\n")) == [Frame(b"PING\r\n", "CONTROL")]


@pytest.mark.parametrize("word", [b"INFO {", b"MSG ", b"PING"])
def test_control_lines_are_bounded(word: bytes) -> None:
    with pytest.raises(ProtocolError, match="1048576"):
        feed_all([word] + [b" " * 1000] * 1100)
    assert feed_all([word] + [b" " * 1000] * 1000) == []


def test_control_line_at_limit() -> None:
    room = definition.MAX_LINE - len(b"INFO {}\r\n")
    fits, too_long = (b"INFO {" + b" " * n + b"}\r\n" for n in (room, room + 1))
    assert len(Framer().feed(fits)) == 1
    for chunks in ([too_long], cut_at(too_long, [5000]), cut_at(too_long, [len(too_long) - 1])):
        with pytest.raises(ProtocolError, match="1048576"):
            feed_all(chunks)


@pytest.mark.parametrize("name", scanner.available())
def test_control_line_at_limit_of_message(name: scanner.Scanner) -> None:
    room = definition.MAX_LINE - len(b"MSG  1 0\r\n")
    for length, good in ((room, True), (room + 1, False)):
        stream = b"PING\r\n" + msg(b"s" * length, 1, b"")
        with using(name):
            if good:
                assert len(Framer().feed(stream)) == 2
            else:
                with pytest.raises(ProtocolError, match="1048576"):
                    Framer().feed(stream)


def test_large_payload_is_examined_once() -> None:
    payload = bytes(8 << 20)
    stream = msg(b"a", 1, payload, ACK) + b"PING\r\n"
    framer = Framer()
    found: list[Frame] = []
    with mock.patch.object(scanner, "find_frames", wraps=scanner.find_frames) as find_frames:
        for place in range(0, len(stream), 32 << 10):
            found += seen(framer.feed(stream[place : place + (32 << 10)]))
    assert [frame.kind for frame in found] == ["MSG", "CONTROL"]
    assert found[0].payload == payload
    assert find_frames.call_count <= 3  # its start, the whole frame, and the next frame


def test_long_line_is_examined_once() -> None:
    stream = b"INFO {" + b"x" * 50_000 + b"}\r\n"
    framer = Framer()
    with mock.patch.object(scanner, "find_frames", wraps=scanner.find_frames) as find_frames:
        counts = [len(framer.feed(stream[i : i + 10])) for i in range(0, len(stream), 10)]
    assert sum(counts) == counts[-1] == 1
    assert find_frames.call_count == 1


def test_blocks_are_released() -> None:
    """A block lives as long as its frames; the framer holds one block, which grows under load."""
    framer = Framer()
    first = framer.feed(msg(b"a", 1, b"x") * 100 + b"MSG")
    kept = weakref.ref(np.asarray(first.buffer).base or first.buffer)
    assert framer.pending == 3
    sizes = set()
    for _ in range(40):
        frames = framer.feed(b" a 1 1\r\nx\r\n" + msg(b"a", 1, b"x" * 1000) * 200 + b"MSG")
        assert len(frames) == 201
        sizes.add(len(frames.buffer))
    assert min(sizes) >= 64 << 10
    assert max(sizes) <= 4 << 20
    del first
    assert kept() is None


def test_received_in_place() -> None:
    """Reads of any size go into the framer's buffer, without the copy of feed()."""
    stream = b"".join(STREAMS.values()) * 3 + msg(b"a", 1, bytes(3_000_000)) + b"PING\r\n"
    for most in (1, 7, 1000, 1 << 30):
        part = stream if most > 7 else stream[:3000]
        framer = Framer()
        found: list[Frame] = []
        position = 0
        while position < len(part):
            room = framer.room()
            count = min(most, len(room), len(part) - position)
            room[:count] = part[position : position + count]
            framer.received(count)
            position += count
            found += seen(framer.frames())
        expected, rest = parse(part)
        assert found == expected
        assert framer.pending == len(rest)
