"""Deliveries of one consumer: read alike by the scanner, the definition and a plain parser."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire.consumer.deliveries import Deliveries, is_delivery
from nats_stream_source.wire.framing import parse as definition
from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.frames import Framer
from tests.unit.wire.reference.frames import seen
from tests.unit.wire.reference.parser import Frame, parse
from tests.unit.wire.reference.streams import BLOCK, FAKE, cut_at, msg, using

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


keys = st.one_of(
    st.sampled_from([b"$KV.b.a", b"$KV.b.key", "$KV.b.ü".encode()]),
    st.binary(min_size=1, max_size=40).filter(lambda key: min(key) > 32),
)
values = st.one_of(
    st.binary(max_size=60),
    st.lists(st.sampled_from([b"\r\n", b"MSG ", FAKE, b"$JS.ACK.", delivery(3)]), max_size=4).map(
        b"".join
    ),
)
numbers = st.one_of(st.integers(0, 20), st.integers(0, 10**8 + 9), st.integers(0, 2**62))
deliveries = st.builds(
    delivery,
    seq=numbers,
    key=keys,
    value=values,
    sid=st.sampled_from([7, 7, 7, 7, 12]),
    header=st.sampled_from([b"", b"", b"", BLOCK]),
    reply=st.sampled_from([V1, V1, V1, V2]),
    pending=numbers,
    time=st.sampled_from([TIME, 0, 999]),
    delivered=st.sampled_from([1, 1, 1, 2, 10]),
)
alike = st.builds(
    lambda first, key, value, count: many(count, first, key=key, value=value),
    st.integers(0, 1200),
    keys,
    values,
    st.integers(1, 30),
)
others = st.sampled_from(
    [b"PING\r\n", b"INFO {}\r\n", b"-ERR 'x'\r\n", msg(b"_I", 7, b"", b"$JS.FC.a", HEARTBEAT)]
)
streams = st.lists(st.one_of(alike, alike, deliveries, others), max_size=8).map(b"".join)


@settings(max_examples=120, deadline=None)
@given(stream=streams, data=st.data())
def test_deliveries_in_random_chunks(stream: bytes, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(stream)), max_size=4))
    for name in scanner.available():
        with using(name):
            check(cut_at(stream, places))
