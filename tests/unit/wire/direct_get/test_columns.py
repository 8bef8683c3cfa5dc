"""Replies as columns equal replies that are read one by one, for any content."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nats_stream_source.wire.ascii_integers import numbers_between
from nats_stream_source.wire.direct_get import columns
from nats_stream_source.wire.direct_get.columns import ReplyColumns, read_replies, texts
from nats_stream_source.wire.direct_get.parse import Row, StoredReply, read_row, stored_reply
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


def plainly(frames: Frames) -> list[StoredReply]:
    """The definition."""
    answers = []
    for i in range(len(frames)):
        row = read_row(frames.header(i))
        if row is None:
            break
        answers.append(stored_reply(frames.header(i), row))
    return answers


def check(frames: Frames) -> ReplyColumns:
    # Copied, the buffer ends where the last frame does.
    compare(Frames.join([frames]))
    return compare(frames)


def compare(frames: Frames) -> ReplyColumns:
    with mock.patch.object(columns, "_COLUMNS_PAY", 1):
        read = read_replies(frames)
        expected = plainly(frames)
        assert list(read) == expected
        assert read.sequences.tolist() == [one.seq for one in expected]
        assert read.own_ends.tolist() == [one.own_end for one in expected]
        assert texts(read.frames, read.subject_spans) == [one.subject for one in expected]
        assert texts(read.frames, read.time_spans) == [one.time for one in expected]
        for name in ("KV_b", "KV_bb", "S", ""):
            assert read.all_from(name) == all(one.stream == name for one in expected)
    return read


def together(frames: Frames) -> list[bool]:
    """Which of the messages are not read one by one."""
    table = np.empty((len(Row._fields), len(frames)), np.int64)
    return [bool(one) for one in columns._parse_similar(frames, table)]


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
            b"Nats-Stream: P\r\nNats-Subject: p\r\nNats-Sequence: 1\r\nNats-Time-Stamp: t\r\n",
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
    "time": st.one_of(st.sampled_from([b"2026-11-21T05:04:14Z"]), _TEXT),
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
    assert len(check(frames)) == 40


def test_frames_empty() -> None:
    none = read_replies(cut([]))
    assert (len(none), list(none), none.all_from("S"), len(ReplyColumns.join([]))) == (
        0,
        [],
        True,
        0,
    )


def test_parts_and_whole() -> None:
    """Positions stay right when frames are copied elsewhere."""
    parts = [
        read_replies(cut([frame(USUAL | {"seq": b"%d" % n}) for n in range(begin, begin + 50)]))
        for begin in (1, 51, 101)
    ]
    whole = ReplyColumns.join(parts)
    assert list(whole) == [answer for part in parts for answer in part]
    assert list(whole[40:120:7]) == list(whole)[40:120:7]
    assert repr(whole) == "<ReplyColumns 150, 1..150>"
    with pytest.raises(IndexError):
        whole[150]


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
