"""Streams of frames: a table, a builder of messages, random streams, and helpers to frame them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import settings, strategies as st

from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.frames import Framer, Frames
from nats_stream_source.wire.framing.parse import FrameKind
from tests.unit.wire.reference.parser import Frame

FAKE = b"\r\nMSG x 1 5\r\nhello\r\nPING\r\n"
BLOCK = b"NATS/1.0\r\nA: b\r\n\r\n"
ACK = b"$JS.ACK.S.C.1.7.3.1732150000123456789.4"
INFO = b'INFO {"server_id":"N","headers":true,"max_payload":1048576} \r\n'


def msg(subject: bytes, sid: int, payload: bytes, reply: bytes = b"", header: bytes = b"") -> bytes:
    """Build a MSG frame, or HMSG with a header block."""
    sizes = [len(header)] if header else []
    sizes.append(len(header) + len(payload))
    words = [b"HMSG" if header else b"MSG", subject, b"%d" % sid, *([reply] if reply else [])]
    line = b" ".join([*words, *(b"%d" % size for size in sizes)])
    return line + b"\r\n" + header + payload + b"\r\n"


def hmsg(block: bytes, payload: bytes = b"") -> bytes:
    """Build a HMSG frame to an inbox, also one with an empty header block."""
    sizes = b"%d %d" % (len(block), len(block) + len(payload))
    return b"HMSG _INBOX.a 7 " + sizes + b"\r\n" + block + payload + b"\r\n"


RUN = 64
"""A number of deliveries."""


def deliveries(
    consumer_seq: int, count: int = RUN, *, sid: int = 1, stream_seq: int | None = None
) -> bytes:
    """Build deliveries from these sequences on; the consumer filters every other message."""
    first = 2 * consumer_seq if stream_seq is None else stream_seq
    reply = b"$JS.ACK.S.C.1.%d.%d.1732150000123456789.4"
    return b"".join(
        msg(b"a", sid, b"x", reply % (first + 2 * i, consumer_seq + i)) for i in range(count)
    )


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


@contextmanager
def using(name: scanner.Scanner) -> Iterator[None]:
    """Find frames with this scanner."""
    before = scanner.selected()
    scanner.select(name)
    try:
        yield
    finally:
        scanner.select(before)


def seen(frames: Frames) -> list[Frame]:
    return [
        Frame(
            raw=frames.bytes_of(i),
            kind=FrameKind(int(frames.kind[i])).name,
            sid=int(frames.sid[i]),
            subject=frames.subject(i),
            reply=frames.reply(i),
            header=frames.header(i),
            payload=frames.payload(i),
        )
        for i in range(len(frames))
    ]


def feed_all(chunks: list[bytes]) -> list[Frame]:
    """Frame the chunks, in order, with one framer."""
    framer = Framer()
    found: list[Frame] = []
    for chunk in chunks:
        found += seen(framer.feed(chunk))
    return found


def cut_at(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(places), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


NASTY = [b"\r\n", b"\n", b"MSG ", b"HMSG ", b" ", b"1", b"5", b"PING\r\n", FAKE, BLOCK, ACK, b"\r"]
words = st.one_of(
    st.sampled_from([b"a", b"MSG", b"$KV.fleet.N1", b"_INBOX.x.1", ACK, "ü".encode()]),
    st.binary(min_size=1, max_size=8).filter(lambda b: not any(c <= 32 for c in b)),
)
payloads = st.one_of(
    st.binary(max_size=40), st.lists(st.sampled_from(NASTY), max_size=8).map(b"".join)
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
random_streams = st.lists(st.one_of(messages, messages, messages, others), max_size=12).map(
    b"".join
)
random_settings = settings(max_examples=300, deadline=None)
