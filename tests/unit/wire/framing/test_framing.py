"""Framing: streams cut at every byte, invalid frames, and comparisons with two other parsers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.protocol.parser import Parser

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.frames import Framer
from tests.unit.wire.reference.frames import seen
from tests.unit.wire.reference.parser import Frame, NotNatsError, parse
from tests.unit.wire.reference.streams import (
    ACK,
    NASTY,
    STREAMS,
    cut_at,
    feed_all,
    msg,
    random_settings,
    random_streams,
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
def test_fields(name: str, way: str) -> None:
    expected, rest = parse(STREAMS[name])
    assert expected
    assert rest == b""
    assert feed_all([STREAMS[name]]) == expected


@pytest.mark.parametrize("name", STREAMS)
def test_cut_at_every_byte(name: str, way: str) -> None:
    stream = STREAMS[name]
    expected, _ = parse(stream)
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


@random_settings
@given(stream=random_streams, data=st.data())
def test_damaged_stream_is_read_alike(stream: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(stream)))
    piece = data.draw(st.one_of(st.sampled_from(NASTY), st.binary(max_size=2)))
    stream = stream[:place] + piece + stream[place + data.draw(st.integers(0, 3)) :]
    results: list[tuple[list[Frame], int] | str] = []
    for way in scanner.available():
        framer = Framer()
        with using(way):
            try:
                results.append((seen(framer.feed(stream)), framer.pending))
            except ProtocolError:
                results.append("no frame")
    try:
        frames, rest = parse(stream)
        results.append((frames, len(rest)))
    except NotNatsError:
        results.append("no frame")
    assert all(result == results[-1] for result in results)
