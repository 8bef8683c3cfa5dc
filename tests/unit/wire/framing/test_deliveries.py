"""Deliveries of one consumer: read alike by the scanner, the definition and a plain parser."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
from tests.unit.wire.reference.parser import Frame, NotNatsError, parse
from tests.unit.wire.reference.streams import using

FAKE = b"\r\nMSG x 1 5\r\nhello\r\nPING\r\n"
BLOCK = b"NATS/1.0\r\nA: b\r\n\r\n"
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
    return message(key, sid, value, reply + numbers, header)


def message(subject: bytes, sid: int, value: bytes, reply: bytes, header: bytes = b"") -> bytes:
    if not header:
        return b"MSG %s %d %s %d\r\n%s\r\n" % (subject, sid, reply, len(value), value)
    sizes = len(header), len(header) + len(value)
    return b"HMSG %s %d %s %d %d\r\n%s%s\r\n" % (subject, sid, reply, *sizes, header, value)


def many(count: int = 150, first: int = 1, **more: object) -> bytes:
    return b"".join(delivery(seq, **more) for seq in range(first, first + count))


@pytest.fixture(params=scanner.available())
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    with using(request.param):
        yield


def check(stream: bytes, chunks: list[bytes] | None = None) -> int:
    """Hold frames and numbers against the plain parser; how many numbers the runs had read."""
    expected, rest = parse(stream)
    framer = Framer()
    found: list[Frame] = []
    known = 0
    for chunk in chunks or [stream]:
        frames = framer.feed(chunk)
        found += seen(frames)
        known += 0 if frames.acks is None else int((frames.acks[0] >= 0).sum())
        deliveries = Deliveries.of(frames.select(is_delivery(frames)))
        for i in range(len(deliveries)):
            words = deliveries.reply(i).split(b".")
            five = [int(word) for word in words[4 if len(words) == 9 else 6 :][:5]]
            assert five == [
                deliveries.delivered[i],
                deliveries.stream_seq[i],
                deliveries.consumer_seq[i],
                deliveries.time[i],
                deliveries.pending[i],
            ]
    assert found == expected
    assert framer.pending == len(rest)
    return known


ALIKE = {
    "plain": many(),
    "keys of all lengths": b"".join(
        delivery(i, b"$KV.b." + b"k" * (1 + i % 90)) for i in range(150)
    ),
    "values of all lengths": b"".join(delivery(i, value=b"v" * (i % 130)) for i in range(150)),
    "empty values": many(value=b""),
    "values that nearly look like frames": many(value=b"\r\nMSGx 1 5\r\nhello\r\nHMS"),
    "line ends in values": many(value=b"\n\r\n \nM\nH\r\nMSG\n"),
    "bytes of all kinds": many(value=bytes(range(256))),
    "headers": many(header=BLOCK),
    "headers, empty values": many(header=BLOCK, value=b""),
    "header blocks of all lengths": b"".join(
        delivery(i, header=b"NATS/1.0\r\nA: %s\r\n\r\n" % (b"b" * (i % 120))) for i in range(150)
    ),
    "v2": many(reply=V2),
    "v2 with headers": many(reply=V2, header=BLOCK),
    "numbers that grow": many(count=1200),
    "pending that falls": b"".join(delivery(i, pending=1100 - i) for i in range(1, 1100)),
    "numbers of eight digits": many(first=99_999_950, count=140),
    "numbers of seventeen digits": many(first=99_999_999_999_999_950, count=140),
    "keys in UTF-8": many(key="$KV.b.käse-ü".encode()),
    "control lines between": (many(60) + b"PING\r\n" + many(60, 61) + b"+OK\r\nPONG\r\n") * 2,
    "errors and INFO between": many(90) + b"-ERR 'x'\r\nINFO {}\r\n" + many(90, 91),
    "heartbeats between": many(90) + message(b"_INBOX.x", 7, b"", b"", HEARTBEAT) + many(90, 91),
    "flow control between": many(70)
    + message(b"_I.x", 7, b"", b"$JS.FC.x.y", HEARTBEAT)
    + many(70),
    "another consumer between": many(90) + many(3, sid=8, reply=V1 + b"x") + many(90, 91),
}


@pytest.mark.parametrize("selected", scanner.available())
@pytest.mark.parametrize("name", ALIKE)
def test_deliveries_are_read_with_their_numbers(name: str, selected: scanner.Scanner) -> None:
    stream = ALIKE[name]
    wrapped = mock.patch.object(definition, "parse_frame", wraps=definition.parse_frame)
    with using(selected), wrapped as slow:
        known = check(stream)
    if selected == "compiled":
        assert known == stream.count(b" $JS.ACK.")
        assert slow.call_count < 16  # the lines between deliveries


OTHERS = {
    "values that look like frames": many(300, value=FAKE),
    "layouts that change all the time": b"".join(
        delivery(seq, reply=V1 if seq % 2 else V2, delivered=1 + 9 * (seq % 3))
        for seq in range(900)
    ),
    "headers now and then": b"".join(delivery(i, header=BLOCK * (i % 2)) for i in range(900)),
    "another subscription in turn": b"".join(delivery(i, sid=7 + i % 2) for i in range(900)),
    "v2 that has grown": many(300, reply=V2).replace(b" 5\r\n", b".new 5\r\n"),
    "not one delivery": b"".join(message(b"s", 3, b"x", b"_INBOX.%d" % i) for i in range(300)),
    "fakes that end every run": b"".join(
        delivery(i, value=b"\r\n" + delivery(i, value=b"inner")) for i in range(300)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_deliveries_among_others(name: str, way: None) -> None:
    check(OTHERS[name])


def test_cut_at_every_byte(way: None) -> None:
    stream = many(3) + b"PING\r\n" + many(3, 4, header=BLOCK, value=FAKE) + delivery(9, value=b"")
    for place in range(len(stream) + 1):
        check(stream, [stream[:place], stream[place:]])


def test_large_payloads_among_small_ones() -> None:
    large = [bytes(1 << 20), FAKE * 60_000, bytes(8 << 20), b"\n" * (1 << 20)]
    stream = b"".join(
        many(80, i * 80) + delivery(i * 80 + 80, value=v) for i, v in enumerate(large)
    )
    chunks = [stream[i : i + 300_000] for i in range(0, len(stream), 300_000)]
    framer = Framer()
    frames = [framer.feed(chunk) for chunk in chunks]
    found = [one.payload(i) for one in frames for i in range(len(one))]
    assert [payload for payload in found if payload != b"value"] == large
    assert len(found) == 4 * 81
    assert framer.pending == 0


DAMAGE = {
    "a space in the key": (b"$KV.b.key", b"$KV.b k.y"),
    "a tab in the key": (b"$KV.b.key", b"$KV.b\tkey"),
    "a control byte in the key": (b"$KV.b.key", b"$KV.b\x01key"),
    "no key": (b"$KV.b.key ", b" "),
    "another sid": (b" 7 ", b" 9 "),
    "two spaces before the sid": (b"$KV.b.key 7 ", b"$KV.b.ke  7 "),
    "another consumer": (b"spark-1", b"spark-2"),
    "no ACK subject": (b"$JS.ACK", b"$JS.ACT"),
    "a letter in a number": (b".950.", b".9a0."),
    "a colon for 10 in a number": (b".950.", b".9:0."),
    "a slash in a number": (b".950.", b".9/0."),
    "no digit in a number": (b".950.", b".\xb950."),
    "no dot": (b".950.", b"0950."),
    "a dot moved": (b"1.950.50.", b"1.95.050."),
    "a length with a letter": (b" 5\r\n", b" x\r\n"),
    "a length that is too small": (b" 5\r\n", b" 4\r\n"),
    "a length that is too large": (b" 5\r\n", b" 6\r\n"),
    "a length beyond the end": (b" 5\r\n", b" 9999999\r\n"),
    "no length": (b" 5\r\n", b" \r\n"),
    "no space before the length": (b" 5\r\n", b".5\r\n"),
    "LF for CR LF": (b" 5\r\nval", b" 5\n\nval"),
    "no CR": (b" 5\r\n", b" 5 \n"),
    "no CR after the value": (b"value\r\n", b"valuex\n"),
    "no LF after the value": (b"value\r\n", b"value\rx"),
    "another word": (b"MSG $", b"NSG $"),
    "a longer word": (b"MSG $", b"MSGX $"),
    "lower case": (b"MSG $", b"msg $"),
    "a number too large": (b"1795226905622377057", b"9795226905622377057"),
}


def outcome(stream: bytes) -> tuple[list[Frame], int] | str:
    framer = Framer()
    try:
        return seen(framer.feed(stream)), framer.pending
    except ProtocolError:
        return "no frame"


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_in_one_line_is_seen(name: str, way: None) -> None:
    old, new = DAMAGE[name]
    line = delivery(50)
    assert old in line
    stream = many(49) + line.replace(old, new, 1) + many(70, 51)
    try:
        frames, rest = parse(stream)
        expected: tuple[list[Frame], int] | str = frames, len(rest)
    except NotNatsError:
        expected = "no frame"
    assert outcome(stream) == expected


def test_line_without_key_is_found(way: None) -> None:
    line = delivery(50, value=bytes(5000)).replace(b"$KV.b.key ", b" ")
    assert outcome(many(49, value=bytes(5000)) + line) == "no frame"


@pytest.mark.parametrize("header", [(b" 18 ", b"x18 "), (b" 18 ", b" 99 "), (b"HMSG ", b"HMSGx")])
def test_damage_in_line_with_headers_is_seen(header: tuple[bytes, bytes], way: None) -> None:
    line = delivery(50, header=BLOCK)
    assert header[0] in line
    stream = many(49, header=BLOCK) + line.replace(*header, 1) + many(70, 51, header=BLOCK)
    assert outcome(stream) == "no frame"
    with pytest.raises(NotNatsError):
        parse(stream)


def test_length_with_invalid_digit_is_found(way: None) -> None:
    line = delivery(50, value=bytes(10)).replace(b" 10\r\n", b" :\r\n")
    assert outcome(many(49, value=b"123456789") + line) == "no frame"


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
    [b"PING\r\n", b"INFO {}\r\n", b"-ERR 'x'\r\n", message(b"_I", 7, b"", b"$JS.FC.a", HEARTBEAT)]
)
streams = st.lists(st.one_of(alike, alike, deliveries, others), max_size=8).map(b"".join)
some = settings(max_examples=120, deadline=None)


@some
@given(stream=streams, data=st.data())
def test_deliveries_in_random_chunks(stream: bytes, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    edges = [0, *places, len(stream)]
    chunks = [stream[a:b] for a, b in itertools.pairwise(edges)]
    for name in scanner.available():
        with using(name):
            check(stream, chunks)


@some
@given(stream=streams, data=st.data())
def test_damaged_deliveries_are_read_alike(stream: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(stream)))
    piece = data.draw(st.one_of(st.sampled_from([b" ", b"\n", b".", b"7"]), st.binary(max_size=2)))
    stream = stream[:place] + piece + stream[place + data.draw(st.integers(0, 2)) :]
    try:
        frames, rest = parse(stream)
        expected: tuple[list[Frame], int] | str = frames, len(rest)
    except NotNatsError:
        expected = "no frame"
    for name in scanner.available():
        with using(name):
            assert outcome(stream) == expected
