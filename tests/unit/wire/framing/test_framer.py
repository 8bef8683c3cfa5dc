"""The state of a framer: errors, limits, pending bytes, buffers, and how often bytes are parsed."""

from __future__ import annotations

import weakref
from unittest import mock

import numpy as np
import pytest

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.framing import parse as definition
from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.frames import Framer
from tests.unit.wire.reference.frames import seen
from tests.unit.wire.reference.parser import Frame, parse
from tests.unit.wire.reference.streams import (
    ACK,
    STREAMS,
    cut_at,
    feed_all,
    msg,
    using,
)


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
