"""Replies as columns equal replies that are read one by one, for any content."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.ascii_integers import numbers_between
from nats_stream_source.wire.direct_get import replies
from nats_stream_source.wire.direct_get.parse import BARE, STREAM, SUBJECT, read_row
from nats_stream_source.wire.direct_get.replies import Replies, read_replies
from nats_stream_source.wire.framing.frames import Framer, Frames
from tests.unit.wire.reference.streams import hmsg

Fields = dict[str, bytes]

USUAL: Fields = {
    "own": b"",
    "stream": b"KV_b",
    "subject": b"$KV.b.k17",
    "seq": b"17",
    "time": b"2026-11-21T05:04:14.123456789Z",
    "pending": b"3",
    "previous": b"12",
    "more": b"",
    "payload": b"value",
}


def block_of(fields: Fields) -> bytes:
    return (
        b"NATS/1.0\r\n%(own)sNats-Stream: %(stream)s\r\nNats-Subject: %(subject)s\r\n"
        b"Nats-Sequence: %(seq)s\r\nNats-Time-Stamp: %(time)s\r\n"
        b"Nats-Num-Pending: %(pending)s\r\nNats-Last-Sequence: %(previous)s\r\n%(more)s\r\n"
    ) % {name.encode(): value for name, value in fields.items()}


def frame(fields: Fields) -> bytes:
    return hmsg(block_of(fields), fields["payload"])


def moved(fields: Fields, begin: int, by: int) -> bytes:
    """A message whose header block begins and ends elsewhere."""
    block = block_of(fields)
    whole = block[begin:] + b"value"
    size = len(block) - begin + by
    return hmsg(whole[:size], whole[size:])


def cut(parts: list[bytes]) -> Frames:
    return Framer().feed(b"".join(parts))


def check(frames: Frames) -> None:
    # Copied, the buffer ends where the last frame does.
    compare(Frames.join([frames]))
    compare(frames)


def compare(frames: Frames) -> None:
    """Compare with the definition."""
    blocks = [frames.header(i) for i in range(len(frames))]
    rows = list(itertools.takewhile(bool, map(read_row, blocks)))
    streams = [
        block[row.own_end + len(STREAM) : row.stream_end]
        for block, row in zip(blocks, rows, strict=False)
    ]
    with mock.patch.object(replies, "_COLUMNS_PAY", 1):
        read = read_replies(frames)
    assert [read.header(i) for i in range(len(read))] == blocks[: len(rows)]
    assert [
        (read.reply(i), read.subject(i), seq, pending, previous, own_end)
        for i, (seq, pending, previous, own_end) in enumerate(
            zip(
                *(one.tolist() for one in (read.stream_seq, read.pending, read.previous)),
                read.own_end.tolist(),
                strict=True,
            )
        )
    ] == [
        (
            stream,
            block[row.stream_end + len(SUBJECT) : row.subject_end],
            row.seq,
            row.pending,
            row.previous,
            row.own_end if row.own_end > BARE else 0,
        )
        for block, row, stream in zip(blocks, rows, streams, strict=False)
    ]
    for name in ("KV_b", "KV_bb", "S", ""):
        assert read.all_from(name) == all(stream == name.encode() for stream in streams)


def together(frames: Frames) -> list[bool]:
    """Which of the messages are not read one by one."""
    times = np.empty((2, len(frames)), np.int64)
    return replies._parse_similar(frames, frames.table.copy(), times).tolist()


_NUMBER = st.one_of(
    st.integers(0, (1 << 64)).map(lambda n: b"%d" % n),
    st.integers(0, 10**19).map(lambda n: b"%022d" % n),
    st.sampled_from([b"", b"0", b"00012", b"-1", b"1x", b" 1", b"1 ", b"\xb2", b"9" * 18]),
)
_TEXT = st.one_of(
    st.sampled_from([b"", b"a\rb", b"a\nb", b"\xc3\xa4", b"\xff", b"a b", b"x" * 300]),
    st.text("abc.$>*", max_size=12).map(str.encode),
)
_LINES = st.lists(
    st.sampled_from(
        [
            b"Nats-Stream: KV_b\r\n",
            b"Nats-Stream: P\r\nNats-Subject: p\r\nNats-Sequence: 1\r\n"
            b"Nats-Time-Stamp: 2026-11-21T05:04:14Z\r\n",
            b"Nats-Num-Pending: 1\r\n",
            b"Nats-Last-Sequence: 1\r\n",
            b"a: b\r\n",
            b"\r\n",
            b"x",
            b"\r",
            b"\n",
        ]
    ),
    max_size=4,
).map(b"".join)
_VALUES: dict[str, st.SearchStrategy[bytes]] = {
    "own": _LINES,
    "stream": st.one_of(st.sampled_from([b"KV_b", b"KV_bb", b"S"]), _TEXT),
    "subject": _TEXT,
    "seq": _NUMBER,
    "time": st.sampled_from([b"2026-11-21T05:04:14Z", b"2026-11-21T06:04:14.1+01:00"]),
    "pending": _NUMBER,
    "previous": _NUMBER,
    "more": _LINES,
    "payload": st.one_of(
        st.binary(max_size=20), st.just(b"\r\n" * 9), st.just(frame(USUAL)), st.just(b"")
    ),
}
_USUAL = st.fixed_dictionaries(
    {
        name: st.integers(0, 10**17).map(lambda n: b"%d" % n)
        for name in ("seq", "pending", "previous")
    }
).map(lambda numbers: USUAL | numbers)
_ODD = st.sampled_from(sorted(_VALUES)).flatmap(
    lambda name: st.builds(lambda f, v: f | {name: v}, _USUAL, _VALUES[name])
)
_ANY = st.one_of(
    _USUAL.map(frame),
    _USUAL.map(frame),
    _ODD.map(frame),
    _ODD.map(frame),
    st.fixed_dictionaries(_VALUES).map(frame),
    st.builds(moved, _ODD, st.integers(0, 9), st.integers(-3, 3)),
    st.builds(
        lambda whole, name: whole.replace(name, name.swapcase()),
        _USUAL.map(frame),
        st.sampled_from(
            [b"Stream", b"Subject", b"-Sequence", b"Last", b"Time", b"Pending", b": ", b"\r\nNats"]
        ),
    ),
    st.builds(
        lambda fields, begin, end: hmsg(frame(fields)[begin:end]),
        _USUAL,
        st.integers(0, 250),
        st.integers(0, 250),
    ),
    st.sampled_from(
        [
            b"MSG _INBOX.a 7 2\r\nhi\r\n",
            hmsg(b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 9\r\n\r\n"),
            hmsg(b"\r\n" * 12),
            hmsg(b"NATS/1.0\r\n\r\n"),
            hmsg(b""),
        ]
    ),
)


@settings(deadline=None)
@given(st.lists(_ANY, min_size=1, max_size=12).map(lambda parts: [frame(USUAL), *parts]))
@example([frame(USUAL), frame(USUAL | {"subject": b"a\rb"})])
@example([frame(USUAL), frame(USUAL | {"seq": b"9" * 19})])
@example([frame(USUAL), frame(USUAL | {"more": b"Nats-New: 1\r\n"})])
@example([frame(USUAL), frame(USUAL | {"more": b"x"})])
@example([frame(USUAL), frame(USUAL).replace(b"Pending", b"pending")])
@example([frame(USUAL), frame(USUAL).replace(b"Last", b"last")])
@example([frame(USUAL), moved(USUAL, len(b"NATS/1.0\r\n"), 0)])
@example([frame(USUAL), moved(USUAL, 0, -1)])
@example([frame(USUAL), hmsg(b"\n" * 8)])
@example([frame(USUAL), hmsg(b"\r\n" * 8)])
@example([frame(USUAL), hmsg(b"NATS/1.0\r\n" + b"x" * 99 + b"\r\n\r\n" + b"\r\n" * 5)])
@example([frame(USUAL | {"stream": b"S" * 300}), frame(USUAL)])
def test_columns_equal_single_parses(parts: list[bytes]) -> None:
    check(cut(parts))


@settings(deadline=None)
@given(st.lists(_ODD, min_size=1, max_size=4), st.integers(0, 40))
def test_unusual_messages_among_many(odd: list[Fields], at: int) -> None:
    parts = [frame(USUAL | {"seq": b"%d" % n}) for n in range(1, 41)]
    parts[at:at] = [frame(one) for one in odd]
    check(cut(parts))


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({}, True),
        ({"own": b"Nats-Msg-Id: 1\r\nStatus: 404\r\n"}, True),
        ({"own": b"Nats-Stream: KV_b\r\n"}, True),
        ({"time": b"2026-11-21T05:04:14Z"}, True),
        ({"seq": b"999999999999999999", "previous": b"0"}, True),
        ({"payload": b"\r\n" * 50}, True),
        ({"stream": b"KV_c"}, False),
        ({"seq": b"9" * 19}, False),
        ({"more": b"Nats-New: 1\r\n"}, False),
    ],
)
def test_usual_frames_are_read_together(fields: Fields, fits: bool) -> None:
    """Usual frames are read together; others have the same result."""
    frames = cut([frame(USUAL), frame(USUAL | fields), frame(USUAL)])
    assert together(frames) == [True, fits, True]
    check(frames)


def test_stray_cr_affects_one_message() -> None:
    frames = cut([frame(USUAL)] * 40 + [frame(USUAL | {"subject": b"a\rb"})] + [frame(USUAL)])
    assert len(read_replies(frames)) == 40


@pytest.mark.parametrize("count", [1, 40], ids=["one by one", "together"])
@pytest.mark.parametrize("time", [b"never", b"2026-13-21T05:04:14Z", b"", b"\xff"])
def test_timestamp_invalid(time: bytes, count: int) -> None:
    with pytest.raises(ProtocolError, match="Nats-Time-Stamp"):
        read_replies(cut([frame(USUAL | {"time": time})] * count))


def test_frames_empty() -> None:
    none = read_replies(cut([]))
    assert (len(none), none.all_from("S"), len(Replies.join([]))) == (0, True, 0)


def test_positions_of_joined_parts() -> None:
    parts = [
        read_replies(cut([frame(USUAL | {"seq": b"%d" % n}) for n in range(begin, begin + 50)]))
        for begin in (1, 51, 101)
    ]
    whole = Replies.chain(parts)
    assert whole.stream_seq.tolist() == list(range(1, 151))
    assert whole.all_from("KV_b")
    assert {whole.subject(i) for i in range(150)} == {USUAL["subject"]}


@settings(deadline=None)
@given(st.lists(st.one_of(_NUMBER, st.binary(max_size=22)), min_size=1, max_size=9))
def test_numbers(numbers: list[bytes]) -> None:
    lengths = np.array([len(number) for number in numbers])
    data = b" " * 24 + b"".join(numbers)
    end = 24 + np.cumsum(lengths)
    values, good = numbers_between(data, end - lengths, end)
    for number, value, is_one in zip(numbers, values.tolist(), good.tolist(), strict=True):
        assert is_one == (number.isdigit() and len(number) <= 18)
        assert not is_one or value == int(number)
