"""Responses of Direct Get from bytes alone: the fields of header blocks, and complete replies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.direct_get.parse import DirectGetStatus
from nats_stream_source.wire.direct_get.replies import DirectGetResponse
from nats_stream_source.wire.framing.frames import Framer, Frames
from tests.unit.wire.reference.streams import hmsg


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


def test_message_reply() -> None:
    found = chain(message(17, 0)).replies
    assert (found.reply(0), found.subject(0), found.payload(0)) == (b"S", b"s.17", b"v")
    numbers = (found.stream_seq, found.time, found.pending, found.previous, found.own_end)
    assert [one.tolist() for one in numbers] == [[17], [1795237454_100000000], [9], [0], [0]]
    assert chain(message(17, None)).replies.pending.tolist() == [-1]


@pytest.mark.parametrize(
    ("block", "status"),
    [
        (b"NATS/1.0 404 Message Not Found\r\n\r\n", DirectGetStatus(404, "Message Not Found")),
        (b"NATS/1.0 408 Bad Request\r\n\r\n", DirectGetStatus(408, "Bad Request")),
        (b"NATS/1.0 413 Too Many Results\r\n\r\n", DirectGetStatus(413, "Too Many Results")),
        (b"NATS/1.0 503\r\n\r\n", DirectGetStatus(503, "")),
        (b"NATS/1.0 503\r\nNats-Subject: $JS.API.DIRECT.GET.S\r\n\r\n", DirectGetStatus(503, "")),
        (b"NATS/1.0 204 EOB\r\nNats-Num-Pending: x\r\n\r\n", DirectGetStatus(204, "EOB", None)),
    ],
)
def test_status_reply(block: bytes, status: DirectGetStatus) -> None:
    assert chain(hmsg(block)).status == status


def test_end_of_batch_reply() -> None:
    whole = chain(message(3, 0) + message(5, 3), eob(5, pending=2, up_to=9))
    assert whole.replies.stream_seq.tolist() == [3, 5]
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
        assert made.replies.stream_seq.tolist() == kept


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


_FIELD = st.sampled_from(
    [
        b"Nats-Stream: OTHER\r\n",
        b"Nats-Subject: x\r\n",
        b"Nats-Sequence: 1\r\n",
        b"Nats-Time-Stamp: never\r\n",
        b"Nats-Num-Pending: 1\r\n",
        b"Nats-Last-Sequence: 1\r\n",
        b"Status: 404\r\n",
        b"a: b\r\n",
        b"\xff\xfe: \xff\r\n",
    ]
)


@given(
    own=st.lists(_FIELD, max_size=8).map(b"".join),
    payload=st.sampled_from([b"", b"x", b"\r\nNats-Stream: P\r\nNats-Subject: p\r\n"]),
    seq=st.integers(1, (1 << 63) - 1),
    previous=st.one_of(st.none(), st.just(0)),
)
def test_publisher_fields_change_nothing(
    own: bytes, payload: bytes, seq: int, previous: int | None
) -> None:
    made = chain(message(seq, previous, own, payload))
    answer = made.replies
    assert answer.all_from("S")
    assert answer.stream_seq.tolist() == [seq]
    assert answer.previous.tolist() == [-1 if previous is None else previous]
    assert answer.own_end.tolist() == [len(b"NATS/1.0\r\n" + own) - 2 if own else 0]


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
    assert whole.replies.stream_seq.tolist() == seqs
    assert not whole.broken
    if lost < len(seqs):
        del parts[lost]
        made = chain(b"".join(parts[:cut]), b"".join(parts[cut:]))
        assert made.replies.stream_seq.tolist() == seqs[:lost]
        assert made.broken
