"""Framing: tables of streams cut at every byte, and properties against a plain reference."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.protocol.parser import Parser
from plain_frames import seen
from reference_parser import Frame, NotNatsError, parse

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire import scan
from nats_stream_source.wire.frames import Framer, Frames, Kind

FAKE = b"\r\nMSG x 1 5\r\nhello\r\nPING\r\n"
BLOCK = b"NATS/1.0\r\nA: b\r\n\r\n"
ACK = b"$JS.ACK.S.C.1.7.3.1732150000123456789.4"
INFO = b'INFO {"server_id":"N","headers":true,"max_payload":1048576} \r\n'


def msg(subject: bytes, sid: int, payload: bytes, reply: bytes = b"", header: bytes = b"") -> bytes:
    sizes = [len(header)] if header else []
    sizes.append(len(header) + len(payload))
    words = [b"HMSG" if header else b"MSG", subject, b"%d" % sid, *([reply] if reply else [])]
    line = b" ".join([*words, *(b"%d" % size for size in sizes)])
    return line + b"\r\n" + header + payload + b"\r\n"


STREAMS = {
    "one": msg(b"a.b", 1, b"hello"),
    "zero length": msg(b"a", 1, b"") * 3,
    "replies": msg(b"a", 1, b"x", ACK) + msg(b"b", 1, b"y") + msg(b"c", 12, b"z" * 11, b"_INBOX.1"),
    "headers": msg(b"a", 1, b"x", ACK, BLOCK) + msg(b"a", 1, b"", b"", BLOCK),
    "control": INFO + b"+OK\r\nPING\r\nPONG\r\n-ERR 'Permissions Violation'\r\n",
    "control words with spaces": b"PING \r\nPONG\t\r\n+OK  \r\nINFO\t{}\r\n-ERR  'x'\r\n",
    "between": msg(b"a", 1, b"1")
    + b"PING\r\n"
    + msg(b"a", 2, b"2", ACK)
    + INFO
    + msg(b"a", 1, b""),
    "fake in a payload": msg(b"a", 1, FAKE) + msg(b"a", 1, b"x") + msg(b"a", 1, FAKE * 2),
    "fakes that adjoin": msg(b"a", 1, b"\r\n" + msg(b"x", 9, b"in") * 3) + msg(b"a", 1, b"out"),
    "fake over the end": msg(b"a", 1, b"\r\nMSG x 1 40\r\n") + msg(b"b", 1, b"x" * 30),
    "payload is a frame": msg(b"a", 1, msg(b"x", 9, b"hello")) + msg(b"b", 2, b"PING\r\n"),
    "payload of line ends": msg(b"a", 1, b"\n") + msg(b"a", 1, b"\r\n\r\n") + msg(b"a", 1, b"\r"),
    "payload of spaces": msg(b"a", 1, b" " * 9)
    + msg(b"a", 1, b"   \r\n")
    + msg(b"a", 1, b"\t \n "),
    "odd spacing": b"MSG  a 1   3\r\nabc\r\nMSG\ta\t1\tr\t1\r\nx\r\nHMSG a 1 r  0  1\r\nx\r\n",
    "digits": b"MSG 7 007 8 0003\r\nabc\r\nMSG a 9223372036854775807 00000000000001\r\nx\r\n",
    "subject looks like a word": msg(b"MSG", 1, b"x", b"HMSG") + msg(b"PING", 1, b"y"),
    "bytes above 127": msg("kv.ü".encode(), 1, bytes(range(256))) + msg(b"\xff", 1, b"\x00"),
    "two spaces before the length": b"MSG a 1  1\r\nx\r\nHMSG a 1  0 1\r\nx\r\n",
    "control byte in a subject": b"MSG a\x011 7 1\r\nx\r\nHMSG a\x011 7 0 1\r\nx\r\n",
    "header block of no bytes": b"HMSG a 1 0 2\r\nhi\r\nHMSG a 1 r 0 0\r\n\r\n",
}

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
    # Lines that only one look more tells from a message.
    "sid and another byte": b"MSG a 1\x01r 1\r\nx\r\n",
    "length after another byte": b"MSG a 1 r\x011\r\nx\r\n",
    "header length after another byte": b"HMSG a 1 r\x010 1\r\nx\r\n",
    "TAB for CR": b"MSG a 1 1\t\nx\r\n",
    "CR before its place": b"MSG a 1 1\rz\nx\r\n",
    "another word of four letters": b"XMSG a 1 0 1\r\nx\r\n",
    "header length with a colon for 10": b"HMSG a 1 : 12\r\n123456789012\r\n",
    "length with a colon for 10": b"MSG a 1 :\r\n1234567890\r\n",
    "sid with a colon for 10": b"MSG a : 1\r\nx\r\n",
    "no subject": b"MSG  1 1\r\nx\r\n",
    "empty length": b"MSG a 1 r \r\n\r\n",
    "nothing after a payload's CR": b"MSG a 1 3\r\nab\r\nPING\r\n",
}


@contextmanager
def scan_pays(frames: int) -> Iterator[None]:
    with mock.patch.object(scan, "_SCAN_PAYS", frames):
        yield


@pytest.fixture(params=["walk", "scan", "both"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each of the two ways alone, and together as they really work."""
    frames = {"walk": 1 << 60, "scan": 0, "both": scan._SCAN_PAYS}[request.param]
    with scan_pays(frames):
        yield request.param


def feed_all(chunks: list[bytes]) -> list[Frame]:
    framer = Framer()
    found: list[Frame] = []
    for chunk in chunks:
        found += seen(framer.feed(chunk))
    return found


def cut_at(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(places), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


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


@pytest.mark.parametrize("name", STREAMS)
def test_byte_by_byte(name: str, way: str) -> None:
    stream = STREAMS[name]
    assert feed_all([stream[i : i + 1] for i in range(len(stream))]) == parse(stream)[0]


@pytest.mark.parametrize("name", STREAMS)
def test_both_ways_give_the_positions_of(name: str) -> None:
    tables = []
    for pays in (0, 1 << 60):
        with scan_pays(pays):
            tables.append(scan.cut(b"PING\r\n" + STREAMS[name])[0][: scan.FIELDS])
    np.testing.assert_array_equal(*tables)


def test_a_scan_leaves_little_to_walk() -> None:
    stream = b"".join(
        msg(b"a" * (1 + i % 9), 10 ** (i % 5), b" \r\n." * (i % 40), *more)
        for i in range(400)
        for more in ((), (ACK,), (ACK, BLOCK), (b"", BLOCK * (1 + i % 9)))
    )
    with scan_pays(0), mock.patch.object(scan, "_walk", wraps=scan._walk) as walk:
        assert feed_all([stream]) == parse(stream)[0]
    assert walk.call_count == 1


def test_all_streams_in_a_row(way: str) -> None:
    stream = b"".join(STREAMS.values()) * 20
    found = feed_all([stream])
    assert found == parse(stream)[0]
    assert b"".join(frame.raw for frame in found) == stream


@pytest.mark.parametrize("name", NO_FRAMES)
def test_no_frame(name: str, way: str) -> None:
    with pytest.raises(NotNatsError):
        parse(NO_FRAMES[name])
    for before in (b"", msg(b"a", 1, b"x", ACK) * 3, msg(b"a", 1, b"x") * 200):
        framer = Framer()
        with pytest.raises(ProtocolError):
            framer.feed(before + NO_FRAMES[name] + msg(b"a", 1, b"x") * 3)


def test_a_failure_lasts_until_reset() -> None:
    framer = Framer()
    with pytest.raises(ProtocolError, match="no NATS frame: b'HELO'"):
        framer.feed(b"HELO\r\n")
    with pytest.raises(ProtocolError, match="reconnect"):
        framer.feed(b"PING\r\n")
    framer.reset()
    assert len(framer.feed(b"PING\r\n")) == 1


def test_an_error_shows_neither_info_nor_payload() -> None:
    for stream in (b"MSG a 1 1\r\nsecret\r\n", b"INFO \vsecret\r\n"):
        with pytest.raises(ProtocolError) as caught:
            Framer().feed(stream)
        assert "secret" not in str(caught.value)


def test_reset_forgets_the_tail() -> None:
    framer = Framer()
    assert len(framer.feed(b"MSG a 1 50\r\nabc")) == 0
    assert framer.pending == 15
    assert repr(framer) == "<Framer pending 15>"
    framer.reset()
    assert framer.pending == 0
    assert seen(framer.feed(b"PING\r\n")) == [Frame(b"PING\r\n", "CONTROL")]


@pytest.mark.parametrize("word", [b"INFO {", b"MSG ", b"PING"])
def test_control_lines_are_bounded(word: bytes) -> None:
    with pytest.raises(ProtocolError, match="1048576"):
        feed_all([word] + [b" " * 1000] * 1100)
    assert feed_all([word] + [b" " * 1000] * 1000) == []


def test_the_longest_control_line() -> None:
    room = scan.MAX_LINE - len(b"INFO {}\r\n")
    fits, too_long = (b"INFO {" + b" " * n + b"}\r\n" for n in (room, room + 1))
    assert len(Framer().feed(fits)) == 1
    for chunks in ([too_long], cut_at(too_long, [5000]), cut_at(too_long, [len(too_long) - 1])):
        with pytest.raises(ProtocolError, match="1048576"):
            feed_all(chunks)


def test_the_longest_control_line_is_the_same_for_a_scan() -> None:
    room = scan.MAX_LINE - len(b"MSG  1 0\r\n")
    for length, good in ((room, True), (room + 1, False)):
        stream = b"PING\r\n" + msg(b"s" * length, 1, b"")
        with scan_pays(0):
            if good:
                assert len(Framer().feed(stream)) == 2
            else:
                with pytest.raises(ProtocolError, match="1048576"):
                    Framer().feed(stream)


def test_a_large_payload_is_looked_at_once() -> None:
    payload = bytes(8 << 20)
    stream = msg(b"a", 1, payload, ACK) + b"PING\r\n"
    framer = Framer()
    found: list[Frame] = []
    with mock.patch.object(scan, "cut", wraps=scan.cut) as cut:
        for place in range(0, len(stream), 32 << 10):
            found += seen(framer.feed(stream[place : place + (32 << 10)]))
    assert [frame.kind for frame in found] == ["MSG", "CONTROL"]
    assert found[0].payload == payload
    assert cut.call_count <= 3  # its beginning, all of it, and what follows


def test_a_long_line_is_looked_at_once() -> None:
    stream = b"INFO {" + b"x" * 50_000 + b"}\r\n"
    framer = Framer()
    with mock.patch.object(scan, "cut", wraps=scan.cut) as cut:
        counts = [len(framer.feed(stream[i : i + 10])) for i in range(0, len(stream), 10)]
    assert sum(counts) == counts[-1] == 1
    assert cut.call_count == 1


def test_many_frames_are_scanned_and_large_ones_are_not() -> None:
    small, large = msg(b"a", 1, b"x") * 500, msg(b"a", 1, bytes(50_000)) * 20
    for stream, scanned in ((small, 1), (large, 0), (large + small, 1), (small[:600], 0)):
        with mock.patch.object(scan, "_Scan", wraps=scan._Scan) as scans:
            Framer().feed(stream)
        assert scans.call_count == scanned


def test_blocks_are_let_go_of() -> None:
    """A block lives as long as its frames; the framer itself holds one, which grows under load."""
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
    """As feed(), but without a copy: reads of any size go into the framer's own memory."""
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


def test_chain_shares_one_buffer_and_joins_several() -> None:
    frames = Framer().feed(STREAMS["between"])
    other = Framer().feed(STREAMS["headers"])
    parts = [frames.select(slice(0, 2)), frames.select(slice(3, 5))]
    chained = Frames.chain(parts)
    assert chained.buffer is frames.buffer
    assert seen(chained) == seen(parts[0]) + seen(parts[1])
    both = Frames.chain([*parts, other])
    assert len(both.buffer) == both.nbytes
    assert seen(both) == seen(chained) + seen(other)
    assert Frames.chain([frames]) is frames
    assert len(Frames.chain([])) == 0


def test_nothing() -> None:
    frames = Framer().feed(b"")
    assert len(frames) == frames.nbytes == 0
    assert repr(frames) == "<Frames none, 0 bytes>"
    assert len(Frames.join([])) == 0
    assert len(Frames.join([frames, frames])) == 0


def test_repr_and_types() -> None:
    stream = STREAMS["headers"] + b"PING\r\n" + msg(b"a", 1, b"x")
    frames = Framer().feed(stream)
    assert repr(frames) == f"<Frames 1 CONTROL, 1 MSG, 2 HMSG, {len(stream)} bytes>"
    assert frames.kind.dtype == np.uint8
    for name in ("begin", "stop", "sid", "subject_begin", "reply_end", "payload_end"):
        assert getattr(frames, name).dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        frames.begin[0] = 1


def test_select() -> None:
    frames = Framer().feed(STREAMS["between"])
    everything = seen(frames)
    mask = frames.kind == Kind.MSG
    chosen = frames.select(mask)
    assert seen(chosen) == [f for f in everything if f.kind == "MSG"]
    assert chosen.buffer is frames.buffer
    assert chosen.nbytes == sum(len(f.raw) for f in everything if f.kind == "MSG")
    assert seen(frames.select(slice(1, 3))) == everything[1:3]
    assert seen(frames.select(np.array([3, 0, 0]))) == [everything[i] for i in (3, 0, 0)]
    assert len(frames.select(slice(0, 0))) == 0


def test_join_copies_only_what_was_selected() -> None:
    one = Framer().feed(STREAMS["between"])
    two = Framer().feed(STREAMS["headers"] + STREAMS["fake in a payload"])
    parts = [one.select(np.array([0, 2, 3])), two.select(slice(0, 0)), two.select(slice(1, 4))]
    joined = Frames.join(parts)
    assert seen(joined) == [frame for part in parts for frame in seen(part)]
    assert joined.buffer == b"".join(frame.raw for frame in seen(joined))
    assert joined.nbytes == len(joined.buffer)
    assert joined.kind.dtype == np.uint8
    backwards = one.select(np.array([4, 1, 1, 0]))
    assert seen(Frames.join([backwards])) == seen(backwards)


class NatsPyClient:
    """What nats-py's parser calls."""

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
def test_nats_py_reads_the_same(name: str) -> None:
    client = NatsPyClient()
    asyncio.run(Parser(client).parse(STREAMS[name]))
    found = feed_all([STREAMS[name]])
    assert client.messages == [
        (f.sid, f.subject, f.reply, f.header, f.payload) for f in found if f.kind != "CONTROL"
    ]
    controls = [f for f in found if f.kind == "CONTROL" and not f.raw.startswith(b"+OK")]
    assert client.others == len(controls)


NASTY = [b"\r\n", b"\n", b"MSG ", b"HMSG ", b" ", b"1", b"5", b"PING\r\n", FAKE, BLOCK, ACK, b"\r"]
words = st.one_of(
    st.sampled_from([b"a", b"MSG", b"$KV.fleet.N1", b"_INBOX.x.1", ACK, "ü".encode()]),
    st.binary(min_size=1, max_size=8).filter(lambda b: not any(c <= 32 for c in b)),
)
payloads = st.one_of(
    st.binary(max_size=40),
    st.lists(st.sampled_from(NASTY), max_size=8).map(b"".join),
)
messages = st.builds(
    msg,
    subject=words,
    sid=st.integers(0, 1 << 40),
    payload=payloads,
    reply=st.one_of(st.just(b""), words),
    header=st.one_of(st.just(b""), st.just(BLOCK), payloads),
)
others = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'x'\r\n", INFO])
streams = st.lists(st.one_of(messages, messages, messages, others), max_size=12).map(b"".join)
ways = st.sampled_from([0, 3, scan._SCAN_PAYS, 1 << 60])
some = settings(max_examples=300, deadline=None)


@some
@given(stream=streams, pays=ways, data=st.data())
def test_any_stream_in_any_chunks(stream: bytes, pays: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    expected, rest = parse(stream)
    assert rest == b""
    with scan_pays(pays):
        assert feed_all(cut_at(stream, places)) == expected


@some
@given(stream=streams, data=st.data())
def test_a_damaged_stream_is_read_alike_by_all(stream: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(stream)))
    piece = data.draw(st.one_of(st.sampled_from(NASTY), st.binary(max_size=2)))
    stream = stream[:place] + piece + stream[place + data.draw(st.integers(0, 3)) :]
    results: list[tuple[list[Frame], int] | str] = []
    for pays in (0, 1 << 60):
        framer = Framer()
        with scan_pays(pays):
            try:
                results.append((seen(framer.feed(stream)), framer.pending))
            except ProtocolError:
                results.append("no frame")
    try:
        frames, rest = parse(stream)
        results.append((frames, len(rest)))
    except NotNatsError:
        results.append("no frame")
    assert results[0] == results[1] == results[2]


@some
@given(stream=streams)
def test_both_ways_give_the_same_positions(stream: bytes) -> None:
    tables = []
    for pays in (0, 1 << 60):
        with scan_pays(pays):
            tables.append(scan.cut(stream)[0][: scan.FIELDS])
    np.testing.assert_array_equal(*tables)


@some
@given(stream=streams, data=st.data())
def test_join_of_any_selection(stream: bytes, data: st.DataObject) -> None:
    frames = Framer().feed(stream)
    indices = st.lists(st.integers(0, max(0, len(frames) - 1)), max_size=len(frames))
    parts = [
        frames.select(np.array(index, np.int64))
        for index in data.draw(st.lists(indices, max_size=3))
    ]
    joined = Frames.join(parts)
    assert seen(joined) == [frame for part in parts for frame in seen(part)]
    assert len(joined.buffer) == joined.nbytes
