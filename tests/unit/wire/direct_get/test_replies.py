"""Direct Get from bytes alone: header blocks, complete responses, many replies at once."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import pytest
from hypothesis import example, given, settings, strategies as st

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.direct_get import replies as module
from nats_stream_source.wire.direct_get.replies import (
    DirectGetResponse,
    DirectGetStatus,
    Replies,
    read_replies,
)
from nats_stream_source.wire.framing.frames import Framer, Frames
from tests.unit.wire.reference.streams import hmsg


class Message(NamedTuple):
    subject: bytes
    stream: bytes
    header: bytes
    seq: int
    time: int
    pending: int
    previous: int
    own_end: int


def messages(replies: Replies) -> list[Message]:
    numbers = (replies.stream_seq, replies.time, replies.pending, replies.previous, replies.own_end)
    return [
        Message(replies.subject(i), replies.reply(i), replies.header(i), *row)
        for i, row in enumerate(zip(*(one.tolist() for one in numbers), strict=True))
    ]


def message(seq: int, previous: int | None, own: bytes = b"", payload: bytes = b"v") -> bytes:
    block = b"NATS/1.0\r\n" + own
    block += b"Nats-Stream: S\r\nNats-Subject: s.%d\r\nNats-Sequence: %d\r\n" % (seq, seq)
    block += b"Nats-Time-Stamp: 2026-11-21T05:04:14.1Z\r\n"
    if previous is not None:
        block += b"Nats-Num-Pending: 9\r\nNats-Last-Sequence: %d\r\n" % previous
    return hmsg(block + b"\r\n", payload)


def eob(last: int, pending: int = 0, up_to: int | None = None) -> bytes:
    block = b"NATS/1.0 204 EOB\r\nNats-Num-Pending: %d\r\nNats-Last-Sequence: %d\r\n"
    block %= (pending, last)
    if up_to is not None:
        block += b"Nats-UpTo-Sequence: %d\r\n" % up_to
    return hmsg(block + b"\r\n")


def frames(data: bytes) -> Frames:
    return Framer().feed(data)


def chain(*parts: bytes) -> DirectGetResponse:
    made = DirectGetResponse()
    for part in parts:
        made.feed(frames(part))
    return made


# -- responses -------------------------------------------------------------------------------------


def test_message_reply() -> None:
    (found,) = messages(chain(message(17, 0)).page)
    assert (found.subject, found.stream) == (b"s.17", b"S")
    assert found[3:] == (17, 1_795_237_454_100_000_000, 9, 0, 0)
    assert chain(message(17, None)).page.pending.tolist() == [-1]


@pytest.mark.parametrize(
    ("block", "status"),
    [
        (b"NATS/1.0 404 Message Not Found\r\n\r\n", DirectGetStatus(404, "Message Not Found")),
        (b"NATS/1.0 408 Bad Request\r\n\r\n", DirectGetStatus(408, "Bad Request")),
        (b"NATS/1.0 503\r\n\r\n", DirectGetStatus(503, "")),
        (b"NATS/1.0 503\r\nNats-Subject: $JS.API.DIRECT.GET.S\r\n\r\n", DirectGetStatus(503, "")),
        (
            b"NATS/1.0 204 EOB\r\nNats-Num-Pending: x\r\nNats-Last-Sequence: 0\r\n\r\n",
            DirectGetStatus(204, "EOB", None, 0),
        ),
    ],
)
def test_status_reply(block: bytes, status: DirectGetStatus) -> None:
    assert chain(hmsg(block)).status == status


def test_end_of_batch_reply() -> None:
    whole = chain(message(3, 0) + message(5, 3), eob(5, pending=2, up_to=9))
    assert whole.page.stream_seq.tolist() == [3, 5]
    assert whole.status == DirectGetStatus(204, "EOB", num_pending=2, last_seq=5, up_to_seq=9)
    assert not whole.broken


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ([message(5, 3)], []),
        ([message(3, 0), message(6, 5)], [3]),
        ([message(3, 0), eob(5)], [3]),
        ([eob(5)], []),
        ([message(3, 0), message(6, 5), message(7, 6), eob(7)], [3]),
    ],
    ids=["first", "middle", "last", "all", "middle, and more"],
)
def test_message_missing(parts: list[bytes], kept: list[int]) -> None:
    for made in (chain(*parts), chain(b"".join(parts))):
        assert made.broken
        assert made.ended
        assert made.status is None
        assert made.page.stream_seq.tolist() == kept


def test_replies_after_end_are_ignored() -> None:
    made = DirectGetResponse()
    taken = made.feed(frames(message(3, 0) + eob(3) + message(4, 3)))
    assert (taken, made.last_seq, made.status and made.status.code) == (1, 3, 204)
    assert made.feed(frames(message(4, 3))) == 0


@pytest.mark.parametrize(
    "frame",
    [
        b"MSG _INBOX.a 7 2\r\nhi\r\n",
        hmsg(b"NATS/1.0\r\na: b\r\n\r\n"),
        hmsg(b"NATS/1.0\r\nNats-Stream: S\r\n\r\n"),
        hmsg(b"NATS/1.0\r\n\r\n", b"Nats-Stream: S"),
        hmsg(b"NATS/1.0 204 EOB\r\n"),
        hmsg(b"HTTP/1.0 204 EOB\r\n\r\n"),
    ],
)
def test_reply_invalid(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        chain(frame)


_OWN = st.lists(
    st.sampled_from(
        [
            b"Nats-Stream: OTHER\r\n",
            b"Nats-Subject: x\r\n",
            b"Nats-Sequence: 1\r\n",
            b"Nats-Time-Stamp: 2026-11-21T05:04:14Z\r\n",
            b"Nats-Num-Pending: 1\r\n",
            b"Nats-Last-Sequence: 1\r\n",
            b"Status: 404\r\n",
            b"a: b\r\n",
            b"\xff\xfe: \xff\r\n",
        ]
    ),
    max_size=8,
).map(b"".join)
_PAYLOADS = st.sampled_from([b"", b"x", b"\r\nNats-Stream: P\r\nNats-Subject: p\r\n", b"\r\n" * 9])


@given(own=_OWN, payload=_PAYLOADS, seq=st.integers(1, 10**18 - 1), count=st.sampled_from([1, 2]))
def test_publisher_fields_change_nothing(own: bytes, payload: bytes, seq: int, count: int) -> None:
    """Neither in a single message nor in a batch."""
    with mock.patch.object(module, "_MANY", 2):
        made = chain(message(seq, None if count == 1 else 0, own, payload) * count)
    assert made.page.all_from("S")
    (answer,) = messages(made.page)
    assert (answer.seq, answer.subject) == (seq, b"s.%d" % seq)
    assert answer.own_end == (len(b"NATS/1.0\r\n" + own) - 2 if own else 0)


@given(
    seqs=st.lists(st.integers(1, 10**9), min_size=1, max_size=30, unique=True).map(sorted),
    lost=st.integers(0, 29),
    cut=st.integers(0, 30),
)
def test_messages_before_loss_are_kept(seqs: list[int], lost: int, cut: int) -> None:
    """The responses arrive in any chunks, and any of them may be lost."""
    before = [0, *seqs[:-1]]
    parts = [message(s, p) for s, p in zip(seqs, before, strict=True)] + [eob(seqs[-1])]
    whole = chain(b"".join(parts[:cut]), b"".join(parts[cut:]))
    assert whole.page.stream_seq.tolist() == seqs
    assert not whole.broken
    if lost < len(seqs):
        del parts[lost]
        made = chain(b"".join(parts[:cut]), b"".join(parts[cut:]))
        assert made.page.stream_seq.tolist() == seqs[:lost]
        assert made.broken


# -- many replies at once --------------------------------------------------------------------------

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


def frame(fields: Fields) -> bytes:
    block = (
        b"NATS/1.0\r\n%(own)sNats-Stream: %(stream)s\r\nNats-Subject: %(subject)s\r\n"
        b"Nats-Sequence: %(seq)s\r\nNats-Time-Stamp: %(time)s\r\n"
        b"Nats-Num-Pending: %(pending)s\r\nNats-Last-Sequence: %(previous)s\r\n%(more)s\r\n"
    ) % {name.encode(): value for name, value in fields.items()}
    return hmsg(block, fields["payload"])


def check(received: Frames) -> Replies:
    """Compare replies that are read at once with those that are read one by one."""
    with mock.patch.object(module, "_MANY", len(received) + 1):
        expected = read_replies(received)
    # Copied, the buffer ends where the last frame does.
    for some in (received, Frames.join([received])):
        with mock.patch.object(module, "_MANY", 1):
            found = read_replies(some)
        assert messages(found) == messages(expected)
        for name in ("KV_b", "KV_bb", "S", ""):
            assert found.all_from(name) == expected.all_from(name)
    return expected


_NUMBER = st.one_of(
    st.integers(0, (1 << 64)).map(lambda n: b"%d" % n),
    st.integers(0, 10**19).map(lambda n: b"%022d" % n),
    st.sampled_from([b"", b"0", b"00012", b"-1", b"1x", b" 1", b"1 ", b"\xb2", b"9" * 18]),
)
# Servers accept no white space in a subject.
_TEXT = st.one_of(
    st.sampled_from([b"", b"\xc3\xa4", b"\xff", b"x" * 300]),
    st.text("abc.$>*", max_size=12).map(str.encode),
)
_VALUES: dict[str, st.SearchStrategy[bytes]] = {
    "own": _OWN,
    "stream": st.one_of(st.sampled_from([b"KV_b", b"KV_bb", b"S"]), _TEXT),
    "subject": _TEXT,
    "seq": _NUMBER,
    "time": st.sampled_from([b"2026-11-21T05:04:14Z", b"2026-11-21T06:04:14.1+01:00"]),
    "pending": _NUMBER,
    "previous": _NUMBER,
    "more": st.one_of(_OWN, st.sampled_from([b"x", b"\r\n", b"\n", b"Nats-New: 1\r\n"])),
    "payload": st.one_of(_PAYLOADS, st.just(frame(USUAL))),
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
            eob(9),
            hmsg(b"\r\n" * 12),
            hmsg(b"NATS/1.0\r\n\r\n"),
            hmsg(b""),
        ]
    ),
)


@settings(deadline=None)
@given(st.lists(_ANY, min_size=1, max_size=12).map(lambda parts: [frame(USUAL), *parts]))
@example([frame(USUAL), frame(USUAL | {"seq": b"9" * 19})])
@example([frame(USUAL), frame(USUAL | {"more": b"Nats-New: 1\r\n"})])
@example([frame(USUAL), frame(USUAL).replace(b"Last", b"last")])
@example([frame(USUAL | {"stream": b"S" * 300}), frame(USUAL)])
def test_columns_equal_single_parses(parts: list[bytes]) -> None:
    check(frames(b"".join(parts)))


@pytest.mark.parametrize(
    ("fields", "at_once"),
    [
        ({}, True),
        ({"own": b"Nats-Msg-Id: 1\r\nStatus: 404\r\n"}, True),
        ({"own": b"Nats-Stream: KV_b\r\n"}, True),
        ({"time": b"2026-11-21T05:04:14Z"}, True),
        ({"stream": b"KV_c"}, True),
        ({"seq": b"999999999999999999", "previous": b"0"}, True),
        ({"payload": b"\r\n" * 50}, True),
        ({"seq": b"1" * 19}, False),
        ({"more": b"Nats-New: 1\r\n"}, False),
    ],
)
def test_usual_replies_are_read_at_once(fields: Fields, at_once: bool) -> None:
    parts = [frame(USUAL)] * 40 + [frame(USUAL | fields)] + [frame(USUAL)] * 40 + [eob(9)]
    with mock.patch.object(module, "_read_one", wraps=module._read_one) as single:
        assert len(read_replies(frames(b"".join(parts)))) == 81
    assert single.call_count == (1 if at_once else 83)  # 1: the last frame
    check(frames(b"".join(parts)))


@pytest.mark.parametrize("count", [1, 80])
@pytest.mark.parametrize("time", [b"", b"never", b"2026-11-21T05:04:14"])
def test_timestamp_invalid(time: bytes, count: int) -> None:
    with pytest.raises(ProtocolError, match="Nats-Time-Stamp"):
        read_replies(frames(frame(USUAL | {"time": time}) * count))


def test_parts_and_whole() -> None:
    """Positions stay right when frames are copied elsewhere."""
    parts = [
        check(frames(b"".join(frame(USUAL | {"seq": b"%d" % n}) for n in range(begin, begin + 50))))
        for begin in (1, 51, 101)
    ]
    whole = Replies.chain(parts)
    assert messages(whole) == [one for part in parts for one in messages(part)]
    assert messages(whole.select(slice(40, 120))) == messages(whole)[40:120]
    none = Replies.chain([])
    assert (messages(none), none.all_from("S")) == ([], True)
