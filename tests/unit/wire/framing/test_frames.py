"""``Frames``: selection, join, chain, columns and representation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.wire.framing.frames import Framer, Frames
from nats_stream_source.wire.framing.scanner import selected
from nats_stream_source.wire.table import FrameKind
from tests.unit.wire.reference.frames import seen
from tests.unit.wire.reference.streams import (
    STREAMS,
    deliveries,
    msg,
    random_settings,
    random_streams,
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


@random_settings
@given(stream=random_streams, data=st.data())
def test_sizes_of_adjacent_frames(stream: bytes, data: st.DataObject) -> None:
    """Frames that are known to be adjacent are, and their sizes are those of all frames."""
    frames = Framer().feed(stream)
    position = st.integers(0, len(frames))
    parts = []
    for _ in range(data.draw(st.integers(1, 4))):
        part = frames.select(slice(*sorted((data.draw(position), data.draw(position)))))
        if data.draw(st.booleans()):
            some = data.draw(st.lists(st.booleans(), min_size=len(part), max_size=len(part)))
            part = part.select(np.array(some, np.bool_))
        parts.append(Frames.join([part]) if data.draw(st.booleans()) else part)
    for one in [frames, *parts, Frames.chain(parts), Frames.join(parts)]:
        sizes = [int(size) for size in one.stop - one.begin]
        assert one.nbytes == sum(sizes)
        if one.adjacent:
            assert (one.begin[1:] == one.stop[:-1]).all()
