"""``Frames`` and their memory, and deliveries of one consumer, read alike by three parsers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.consumer.deliveries import Deliveries, is_delivery
from nats_stream_source.wire.framing import parse as definition, scanner
from nats_stream_source.wire.framing.frames import Framer, Frames
from nats_stream_source.wire.framing.parse import FrameKind
from nats_stream_source.wire.framing.scanner import BufferPool, selected
from tests.unit.wire.reference.parser import Frame, parse
from tests.unit.wire.reference.streams import (
    BLOCK,
    STREAMS,
    cut_at,
    deliveries,
    msg,
    random_settings,
    random_streams,
    seen,
    using,
)

IS_COMPILED = selected() == "compiled"


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


def test_empty_frames() -> None:
    frames = Framer().feed(b"")
    assert len(frames) == frames.nbytes == 0
    assert len(Frames.join([])) == 0
    assert len(Frames.join([frames, frames])) == 0


def test_rows_are_read_only_integers() -> None:
    frames = Framer().feed(STREAMS["headers"])
    for name in ("kind", "begin", "stop", "sid", "subject_begin", "reply_end", "payload_end"):
        assert getattr(frames, name).dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        frames.begin[0] = 1


def test_select() -> None:
    frames = Framer().feed(STREAMS["between"])
    everything = seen(frames)
    mask = frames.kind == FrameKind.MSG
    chosen = frames.select(mask)
    assert seen(chosen) == [f for f in everything if f.kind == "MSG"]
    assert chosen.buffer is frames.buffer
    assert chosen.nbytes == sum(len(f.raw) for f in everything if f.kind == "MSG")
    assert seen(frames.select(slice(1, 3))) == everything[1:3]
    assert seen(frames.select(np.array([3, 0, 0]))) == [everything[i] for i in (3, 0, 0)]
    assert len(frames.select(slice(0, 0))) == 0


def test_chain_of_adjacent_reads_is_view() -> None:
    """Frames of several reads of a block are columns of one table, which is not copied."""
    framer = Framer()
    framer.feed(msg(b"warm", 1, b"up") * 2000)
    framer.room(60_000)  # a new block, and a table of about 2,000 columns
    reads = [framer.feed(msg(b"a", read, b"x") * 300) for read in range(4)]
    for parts in (reads, [reads[1].select(slice(7, 300)), reads[2].select(slice(0, 9))]):
        chained = Frames.chain(parts)
        assert seen(chained) == [frame for part in parts for frame in seen(part)]
        assert np.shares_memory(chained.table, parts[0].table) is IS_COMPILED
    for parts in (
        [reads[0], reads[2]],
        [reads[1], reads[0]],
        [reads[0].select(slice(0, 9)), reads[1]],
        [reads[0].select(np.array([0, 1])), reads[0].select(np.array([2]))],
    ):
        chained = Frames.chain(parts)
        assert seen(chained) == [frame for part in parts for frame in seen(part)]
        assert not np.shares_memory(chained.table, parts[0].table)


def test_deliveries_in_sequence() -> None:
    """The property holds for adjacent frames only, and is not verified again."""
    framer = Framer()
    one, two = framer.feed(deliveries(100)), framer.feed(deliveries(164))
    assert one.in_sequence
    assert two.in_sequence
    assert one.select(slice(1, 3)).in_sequence
    assert not one.select(slice(0, 3, 2)).in_sequence
    assert not one.select(np.array([0, 1])).in_sequence
    assert Frames.chain([one, two]).in_sequence
    assert Frames.chain([one.select(slice(0, 0)), two]).in_sequence
    for parts in ([two, one], [one.select(slice(0, 2)), two], [one, one]):
        assert not Frames.chain(parts).in_sequence
    for other in (
        deliveries(165, stream_seq=328),
        deliveries(164, stream_seq=326),
        deliveries(164, sid=2),
        b"PING\r\n",
        msg(b"a", 1, b"x", b"_INBOX.1"),
    ):
        assert not Framer().feed(deliveries(100) + other).in_sequence
        assert not Frames.chain([one, framer.feed(other)]).in_sequence


@random_settings
@given(stream=random_streams, data=st.data())
def test_join_and_sizes_of_any_selection(stream: bytes, data: st.DataObject) -> None:
    """Frames that are known to be adjacent are, and their sizes are those of all frames."""
    frames = Framer().feed(stream)
    position = st.integers(0, len(frames))
    parts = []
    for _ in range(data.draw(st.integers(0, 4))):
        part = frames.select(slice(*sorted((data.draw(position), data.draw(position)))))
        if data.draw(st.booleans()):
            indices = st.lists(st.integers(0, max(0, len(part) - 1)), max_size=len(part))
            part = part.select(np.array(data.draw(indices), np.int64))
        parts.append(Frames.join([part]) if data.draw(st.booleans()) else part)
    joined, chained = Frames.join(parts), Frames.chain(parts)
    assert seen(joined) == seen(chained) == [frame for part in parts for frame in seen(part)]
    assert len(joined.buffer) == joined.nbytes
    for one in [frames, *parts, chained, joined]:
        sizes = [int(size) for size in one.stop - one.begin]
        assert one.nbytes == sum(sizes)
        if one.adjacent:
            assert (one.begin[1:] == one.stop[:-1]).all()


VIEWS: dict[str, Callable[[np.ndarray], Any]] = {
    "the array": lambda array: array,
    "a slice": lambda array: array[3:9],
    "a slice of a slice": lambda array: array[2:][3:9][::2],
    "another type": lambda array: array.view(np.int8),
    "a memoryview": memoryview,
    "a slice of a memoryview": lambda array: memoryview(array)[3:9],
    "an array over a memoryview": lambda array: np.frombuffer(memoryview(array)[3:9], np.uint8),
    "an Arrow buffer": lambda array: pa.py_buffer(memoryview(array)),
    "an Arrow array": lambda array: pa.Array.from_buffers(
        pa.uint8(), 9, [None, pa.py_buffer(array)]
    ),
}


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_memory_in_use_is_not_used_again(view: Callable[[np.ndarray], Any]) -> None:
    pool = BufferPool()
    first = pool.block(1000)
    used = address(first)
    held = view(first)
    del first
    second = pool.block(1000)
    assert address(second) != used
    del held
    third = pool.block(1000)
    assert address(third) == used


def test_table_view_keeps_table() -> None:
    pool = BufferPool()
    row = pool.table(16, 100)[3, 10:20]
    assert not pool._unused
    del row
    assert list(map(len, pool._unused)) == [12800]


def test_table_has_all_columns_of_its_memory() -> None:
    pool = BufferPool()
    del (first := [pool.table(16, 100)])[:]
    assert not first
    table = pool.table(16, 90)
    assert table.shape == (16, 100)
    assert table.dtype == np.int64
    assert table.flags.c_contiguous


def test_unused_memory_is_bounded() -> None:
    pool = BufferPool()
    blocks = [pool.block(1000 + i) for i in range(5)]
    del blocks
    assert len(pool._unused) == 2


@pytest.mark.parametrize("size", [1, 249, 1001])
def test_memory_of_another_size_is_dropped(size: int) -> None:
    pool = BufferPool()
    pool.block(1000)
    assert len(pool.block(size)) == size
    assert list(map(len, pool._unused)) == [size]


def test_frames_that_are_held_keep_their_bytes() -> None:
    """Many blocks are received while some frames of earlier ones are held, at random."""
    chance = random.Random(3)
    line = b"MSG a 1 8000\r\n%08d" + b"x" * 7992 + b"\r\n"
    stream = memoryview(b"".join(line % serial for serial in range(12_000)))
    framer, position = Framer(), 0
    held: list[tuple[Frames, bytes]] = []
    blocks: list[int] = []
    while position < len(stream):
        room = framer.room()
        piece = stream[position : position + len(room)]
        room[: len(piece)] = piece
        position += len(piece)
        framer.received(len(piece))
        del room
        frames = framer.frames()
        if (block := address(np.frombuffer(frames.buffer, np.uint8))) not in blocks[-1:]:
            blocks.append(block)
        index = chance.randrange(len(frames))
        held.append((frames.select(slice(index, index + 1)), frames.payload(index)))
        chance.shuffle(held)
        del held[6:]
        for one, payload in held:
            assert one.payload(0) == payload
    assert len(blocks) > 20
    assert len(set(blocks)) < len(blocks)  # blocks were used again


HEARTBEAT = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 3\r\n\r\n"
V1, V2 = b"$JS.ACK.KV_b.spark-1", b"$JS.ACK._.x2eAcc0uNt.KV_b.spark-1"
TIME = 1_795_226_905_622_377_007


def delivery(
    seq: int,
    key: bytes = b"$KV.b.key",
    value: bytes = b"value",
    *,
    sid: int = 7,
    header: bytes = b"",
    reply: bytes = V1,
    pending: int = 400_000,
    time: int = TIME,
    delivered: int = 1,
) -> bytes:
    numbers = b".%d.%d.%d.%d.%d" % (delivered, seq + 900, seq, time + seq, pending)
    return msg(key, sid, value, reply + numbers, header)


def many(count: int = 150, first: int = 1, **more: object) -> bytes:
    return b"".join(delivery(seq, **more) for seq in range(first, first + count))


def check(chunks: list[bytes]) -> int:
    """Hold frames and numbers against the plain parser; how many numbers the scanner had read."""
    expected, rest = parse(b"".join(chunks))
    framer = Framer()
    found: list[Frame] = []
    known = 0
    for chunk in chunks:
        frames = framer.feed(chunk)
        found += seen(frames)
        known += int((frames.acks[0] >= 0).sum())
        deliveries = Deliveries.of(frames.select(is_delivery(frames)))
        for i in range(len(deliveries)):
            words = deliveries.reply(i).split(b".")
            five = [int(word) for word in words[4 if len(words) == 9 else 6 :][:5]]
            assert five == deliveries.acks[:, i].tolist()
    assert found == expected
    assert framer.pending == len(rest)
    return known


ALIKE = {
    "plain": many(),
    "keys of all lengths": b"".join(
        delivery(i, b"$KV.b." + b"k" * (1 + i % 90)) for i in range(150)
    ),
    "values of all lengths": b"".join(delivery(i, value=b"v" * (i % 130)) for i in range(150)),
    "values that nearly look like frames": many(value=b"\r\nMSGx 1 5\r\nhello\r\nHMS"),
    "bytes of all kinds": many(value=bytes(range(256))),
    "header blocks of all lengths": b"".join(
        delivery(i, header=b"NATS/1.0\r\nA: %s\r\n\r\n" % (b"b" * (i % 120))) for i in range(150)
    ),
    "v2 with headers": many(reply=V2, header=BLOCK),
    "numbers that grow": many(count=1200),
    "pending that falls": b"".join(delivery(i, pending=1100 - i) for i in range(1, 1100)),
    "numbers of eight digits": many(first=99_999_950, count=140),
    "numbers of seventeen digits": many(first=99_999_999_999_999_950, count=140),
    "keys in UTF-8": many(key="$KV.b.käse-ü".encode()),
    "control lines between": (many(60) + b"PING\r\n" + many(60, 61) + b"+OK\r\nPONG\r\n") * 2,
    "heartbeats between": many(90) + msg(b"_INBOX.x", 7, b"", b"", HEARTBEAT) + many(90, 91),
    "flow control between": many(70) + msg(b"_I", 7, b"", b"$JS.FC.x", HEARTBEAT) + many(70),
    "another consumer between": many(90) + many(3, sid=8, reply=V1 + b"x") + many(90, 91),
    "layouts that change all the time": b"".join(
        delivery(seq, reply=V1 if seq % 2 else V2, delivered=1 + 9 * (seq % 3))
        for seq in range(900)
    ),
    "v2 that has grown": many(300, reply=V2).replace(b" 5\r\n", b".new 5\r\n"),
    "fakes that end every run": b"".join(
        delivery(i, value=b"\r\n" + delivery(i, value=b"inner")) for i in range(300)
    ),
}


@pytest.mark.parametrize("selected", scanner.available())
@pytest.mark.parametrize("name", ALIKE)
def test_deliveries_are_read_with_their_numbers(name: str, selected: scanner.Scanner) -> None:
    stream = ALIKE[name]
    wrapped = mock.patch.object(definition, "parse_frame", wraps=definition.parse_frame)
    with using(selected), wrapped as slow:
        known = check([stream])
    if selected == "compiled":
        assert known == len([one for one in parse(stream)[0] if one.reply.startswith(b"$JS.ACK.")])
        assert slow.call_count < 16  # the lines between deliveries


@pytest.mark.parametrize("number", [b"10:1", b"9223372036854775808", b"9795226905622377057"])
def test_reply_with_invalid_number_is_refused_by_name(number: bytes) -> None:
    """Also where it has as many digits as the numbers before it."""
    bad = delivery(101, time=TIME).replace(b"%d" % (TIME + 101), number)
    frames = Framer().feed(many(100) + bad + many(100, 102))
    assert len(frames) == 201
    with pytest.raises(ProtocolError, match=f"'{number.decode()}' is not an integer"):
        Deliveries.of(frames)


@settings(max_examples=120, deadline=None)
@given(name=st.sampled_from(sorted(ALIKE)), data=st.data())
def test_deliveries_in_random_chunks(name: str, data: st.DataObject) -> None:
    stream = ALIKE[name][:9000]
    places = data.draw(st.lists(st.integers(0, len(stream)), max_size=4))
    for way in scanner.available():
        with using(way):
            check(cut_at(stream, places))
