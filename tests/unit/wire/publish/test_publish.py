"""What is published: header blocks, frames, hashes of their content, PubAcks and fast ingest."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, strategies as st

from nats_stream_source.wire.framing.frames import Framer, Frames
from nats_stream_source.wire.header_columns import HEADERS, header_maps
from nats_stream_source.wire.headers import parse_headers
from nats_stream_source.wire.publish import frames as module
from nats_stream_source.wire.publish.fast_ingest import (
    END,
    MAX_FLOW,
    PING,
    BatchResponse,
    ResponseKind,
    control,
    encode_batch,
    parse_reply,
    parse_response,
)
from nats_stream_source.wire.publish.frames import EncodedFrames, MessageColumns, encode
from nats_stream_source.wire.publish.headers import (
    blocks,
    combine,
    field,
    hash_column,
    map_fields,
    replace_value,
)
from nats_stream_source.wire.publish.pub_acks import learn, parse
from nats_stream_source.wire.publish.unsendable import Unsendable

Map: TypeAlias = "list[tuple[str, list[str] | None]] | None"
NAMES = st.sampled_from(["A", "Trace-Id", "b", "Nats-Msg-Id", "nats-ttl", "KV-Operation", "KV-O"])
VALUES = st.sampled_from(["", "1", "é x", "a: b", "trailing "])
MAPS = st.lists(
    st.none()
    | st.lists(
        st.tuples(NAMES, st.none() | st.lists(VALUES, max_size=3)),
        max_size=3,
        unique_by=lambda one: one[0],
    ),
    max_size=8,
)


def lines(one: Map) -> bytes | None:
    kept = [
        f"{name}: {value}\r\n".encode()
        for name, values in one or []
        if not name.lower().startswith("nats-") and name.lower() != "kv-operation"
        for value in values or []
    ]
    return b"".join(kept) or None


@given(MAPS, st.integers(0, 3))
def test_maps(maps: list[Map], start: int) -> None:
    column = pa.array(maps, HEADERS)[start:]
    assert map_fields(column)[0].to_pylist() == [lines(one) for one in maps[start:]]


@given(MAPS)
def test_headers_roundtrip(maps: list[Map]) -> None:
    written = blocks([map_fields(pa.array(maps, HEADERS))[0]])
    if written is None:
        assert all(lines(one) is None for one in maps)
        return
    read = header_maps(written).to_pylist()
    expected = [
        None
        if lines(one) is None
        else [
            (name, values)
            for name, values in one or []
            if values and lines([(name, values)]) is not None
        ]
        for one in maps
    ]
    assert read == expected


def test_fields_of_block() -> None:
    ids = field("Nats-Msg-Id", pa.array(["x", None, None]))
    ttl = field("Nats-TTL", pa.array([None, 5, None]))
    found = blocks([ids, ttl])
    assert found is not None
    assert found.to_pylist() == [
        b"NATS/1.0\r\nNats-Msg-Id: x\r\n\r\n",
        b"NATS/1.0\r\nNats-TTL: 5\r\n\r\n",
        None,
    ]
    assert blocks([field("A", pa.array([None, None], pa.string()))]) is None
    assert blocks([]) is None


def test_value_is_replaced() -> None:
    block = b"NATS/1.0\r\nExpected: 0\r\nId: 0\r\n\r\n"
    assert replace_value(block, "Expected", "17") == b"NATS/1.0\r\nExpected: 17\r\nId: 0\r\n\r\n"
    assert parse_headers(replace_value(block, "Id", "x")).get("Id") == "x"


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("a", ["1\r\nb: 2"], "without line breaks"),
        ("a", ["1\nb"], "without line breaks"),
        ("a", [" 1"], "without white space before it"),
        ("a", [None], "must be a string"),
        ("a b", ["1"], "name must be visible ASCII"),
        ("a:", ["1"], "name must be visible ASCII"),
        ("", ["1"], "name must be visible ASCII"),
        ("a\r\n", ["1"], "name must be visible ASCII"),
    ],
)
def test_headers_unsendable(name: str, values: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=rf"^row 1: .*{problem}"):
        map_fields(pa.array([[("ok", ["fine"])], [(name, values)]], HEADERS))


UNSENDABLE = [
    [("ok", ["fine"]), ("Größe", ["1", "2"])],
    None,
    [("a b:%", ["x"]), ("ok", [" 1", "a\r\nb%", None])],
]


ENCODED = [
    b"ok: fine\r\nGr%C3%B6%C3%9Fe: 1\r\nGr%C3%B6%C3%9Fe: 2\r\n",
    None,
    b"a%20b%3A%25: x\r\nok: %201\r\nok: a%0D%0Ab%25\r\nok: \r\n",
]


@pytest.mark.parametrize(
    ("how", "expected"),
    [(Unsendable.SKIP, [b"ok: fine\r\n", None, None]), (Unsendable.ENCODE, ENCODED)],
)
def test_headers_unsendable_are_changed_and_counted(
    how: Unsendable, expected: list[bytes | None]
) -> None:
    fields, changed = map_fields(pa.array(UNSENDABLE, HEADERS), how)
    assert (fields.to_pylist(), changed) == (expected, 6)


BLOCK = b"NATS/1.0\r\nA: b\r\n\r\n"


def reference(subject: str, reply: str, payload: bytes, block: bytes | None) -> bytes:
    if block is None:
        return f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n"
    sizes = f"{len(block)} {len(block) + len(payload)}"
    return f"HPUB {subject} {reply} {sizes}\r\n".encode() + block + payload + b"\r\n"


Message = tuple[str, bytes, "bytes | None"]
MESSAGES = st.lists(
    st.tuples(
        st.text("abc.é", min_size=1, max_size=5),
        st.binary(max_size=20),
        st.sampled_from([None, b"", BLOCK]),
    ),
    max_size=12,
)


def columns(messages: list[Message]) -> MessageColumns:
    return MessageColumns(
        pa.array([subject for subject, _, _ in messages], pa.string()),
        pa.array([payload for _, payload, _ in messages], pa.binary()),
        pa.array([block for _, _, block in messages], pa.binary()),
    )


@given(MESSAGES, st.integers(0, 10**12), st.integers(0, 5))
def test_frames_are_those_of_reference(
    messages: list[Message], first_serial: int, start: int
) -> None:
    sliced = columns(messages).slice(start, len(messages))
    encoded = encode(sliced, "_INBOX.x.", first_serial)
    expected = [
        reference(subject, f"_INBOX.x.{first_serial + i}", payload, block)
        for i, (subject, payload, block) in enumerate(messages[start:])
    ]
    assert bytes(encoded.buffer) == b"".join(expected)
    assert encoded.ends.tolist() == np.cumsum([len(one) for one in expected]).tolist()
    for i, one in enumerate(expected):
        assert bytes(encoded.bytes_of(i, i + 1)) == one
        assert encoded.nbytes(i, i + 1) == len(one)


def test_sizes_count_headers_and_payload_as_server_does() -> None:
    messages = columns([("a", b"12", None), ("b", b"3", BLOCK)])
    assert messages.sizes().tolist() == [2, len(BLOCK) + 1]
    assert messages.with_headers(BLOCK).sizes().tolist() == [len(BLOCK) + 2, len(BLOCK) + 1]
    assert [messages.subject(i) for i in range(2)] == ["a", "b"]


def test_messages_exceed_arrow_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    with pytest.raises(OverflowError, match=r"could not encode 2 messages: .* publish fewer"):
        encode(columns([("a", b"x" * 30, None)] * 2), "r.", 1)


@given(st.lists(st.none() | st.binary(max_size=40), max_size=30), st.integers(0, 5))
def test_position_and_neighbours_do_not_matter(values: list[bytes | None], start: int) -> None:
    sliced = hash_column(pa.array(values, pa.binary())[start:]).tolist()
    assert sliced == [int(hash_column(pa.array([v], pa.binary()))[0]) for v in values[start:]]


@given(st.lists(st.binary(max_size=24), unique=True, max_size=200))
def test_different_content(values: list[bytes]) -> None:
    assert len(set(hash_column(pa.array(values, pa.binary())).tolist())) == len(values)


def test_similar_content() -> None:
    for base in (bytes(range(64)), bytes(range(256)) * 17):
        similar = [base, base[8:16] + base[:8] + base[16:]]
        similar += [base[:i] + bytes([base[i] ^ 128]) + base[i + 1 :] for i in range(64)]
        similar += [base[:-i] for i in range(1, 64)]
        similar += [base + b"\0" * i for i in range(1, 20)]
        # Words that change by +1, -2, +1.
        words = [int.from_bytes(base[i : i + 8], "little") for i in range(0, 24, 8)]
        stepped = [word + step for word, step in zip(words, (1, -2, 1), strict=True)]
        similar.append(b"".join(word.to_bytes(8, "little") for word in stepped) + base[24:])
        assert len(set(hash_column(pa.array(similar)).tolist())) == len(similar)


def test_strings_hash_as_their_bytes_and_pairs_are_ordered() -> None:
    text, data = hash_column(pa.array(["é", "b"])), hash_column(pa.array(["é".encode(), b"b"]))
    assert text.tolist() == data.tolist()
    assert combine(text[:1], text[1:]).tolist() != combine(text[1:], text[:1]).tolist()


LONG, SHORT = "_INBOX.aVUZ6Q2wVGmW8JSxrDFKLq.", "_I."
USUAL = b'{"stream":"ORDERS","seq":7}'
LEARNED = learn(USUAL)

PAYLOADS: list[tuple[bytes, int]] = [
    (b'{"stream":"ORDERS","seq":1}', 1),
    (b'{"stream":"ORDERS","seq":999999999999999999}', 999999999999999999),
    (b'{"stream":"ORDERS","seq":9999999999999999999}', -1),  # 19 digits: left to the caller
    (b'{"stream":"ORDERS","seq":1,"duplicate": true}', -1),
    (b'{"stream":"OTHERS","seq":1}', -1),
    (b'{"stream":"ORDERS","seq":}', -1),
    (b'{"stream":"ORDERS","seq":1', -1),
    (b'{"stream":"ORDERS","seq":-1}', -1),
    (b'{"stream":"ORDERS","seq":1 }', -1),
    (b'{"error":{"code":503},"stream":"ORDERS","seq":0}', -1),
    (b"", -1),
    (b"+OK", -1),
]


def received(prefix: str, messages: list[tuple[bytes, bytes]]) -> Frames:
    return Framer().feed(
        b"".join(
            b"MSG %s%s 1 %d\r\n%s\r\n" % (prefix.encode(), token, len(payload), payload)
            for token, payload in messages
        )
    )


@pytest.mark.parametrize("prefix", [LONG, SHORT])
def test_sequences(prefix: str) -> None:
    frames = received(prefix, [(b"%d" % i, p) for i, (p, _) in enumerate(PAYLOADS)])
    serials, seqs = parse(frames, prefix.encode(), LEARNED)
    assert serials.tolist() == list(range(len(PAYLOADS)))
    assert seqs.tolist() == [seq for _, seq in PAYLOADS]


@pytest.mark.parametrize("prefix", [LONG, SHORT])
def test_serials(prefix: str) -> None:
    tokens = [b"0", b"17", b"123456789012345678", b"x", b"1x", b"-1", b"1.2"]
    serials, _ = parse(received(prefix, [(t, USUAL) for t in tokens]), prefix.encode(), LEARNED)
    assert serials.tolist() == [0, 17, 123456789012345678, -1, -1, -1, -1]


def test_message_with_headers_is_not_pub_ack() -> None:
    block = b"NATS/1.0 503\r\n\r\n"
    size = len(block)
    frame = b"HMSG %s3 1 %d %d\r\n%s\r\n" % (LONG.encode(), size, size, block)
    both = b"HMSG %s4 1 %d %d\r\n%s%s\r\n" % (LONG.encode(), size, size + len(USUAL), block, USUAL)
    serials, seqs = parse(Framer().feed(frame + both), LONG.encode(), LEARNED)
    assert serials.tolist() == [3, 4]
    assert seqs.tolist() == [-1, -1]


def test_form_is_learned_before_parsing() -> None:
    _, seqs = parse(received(LONG, [(b"1", USUAL)]), LONG.encode(), b"")
    assert seqs.tolist() == [-1]


@pytest.mark.parametrize(
    ("payload", "learned"),
    [
        (USUAL, b'{"stream":"ORDERS","seq":'),
        (b'{"stream":"S","domain":"hub","seq":3}', b'{"stream":"S","domain":"hub","seq":'),
        (b'{"seq":3,"stream":"S"}', b""),
        (b'{"stream":"S","seq": 3}', b""),
        (b'{"stream":"S"}', b""),
    ],
)
def test_learning(payload: bytes, learned: bytes) -> None:
    assert learn(payload) == learned


INBOX = "_INBOX.abc."
ERROR = {"code": 503, "err_code": 10077, "description": "maximum messages exceeded"}
ERROR_JSON = b'{"code":503,"err_code":10077,"description":"maximum messages exceeded"}'


def numbered(count: int, headers: bool = False) -> MessageColumns:
    return MessageColumns(
        pa.array([f"s.{i}" for i in range(count)]),
        pa.array([b"%d" % i for i in range(count)], pa.binary()),
        pa.array([BLOCK] * count, pa.binary()) if headers else None,
    )


def replies(frames: EncodedFrames, start: int = 0) -> list[str]:
    one_each = [bytes(frames.bytes_of(i, i + 1)) for i in range(start, len(frames))]
    return [frame.split(b" ")[2].decode() for frame in one_each]


# -- frames ----------------------------------------------------------------------------------------

OPERATIONS = [
    (1, 0, ["1.2"]),  # a single message commits the batch that it begins
    (2, 0, ["1.0", "2.2"]),
    (4, 0, ["1.0", "2.1", "3.1", "4.2"]),
    (4, 2, ["1.0", "2.2"]),  # sent again from the third message on
    (4, 3, ["1.2"]),
]


@pytest.mark.parametrize(("count", "start", "expected"), OPERATIONS)
def test_numbers_and_operations(count: int, start: int, expected: list[str]) -> None:
    frames = encode_batch(numbered(count), INBOX, 70, start, 100)
    assert (frames.first_serial, len(frames)) == (70, count)
    prefix = f"{INBOX}abc-{70 + start}.100.fail."
    assert replies(frames, start) == [f"{prefix}{one}.$FI" for one in expected]


@pytest.mark.parametrize("headers", [False, True])
def test_frames_are_whole(headers: bool) -> None:
    frames = encode_batch(numbered(2, headers), INBOX, 0, 0, MAX_FLOW)
    command, sizes, block = ("HPUB", "18 19", BLOCK) if headers else ("PUB", "1", b"")
    expected = [
        f"{command} s.{i} _INBOX.abc.abc-0.500.fail.{i + 1}.{2 * i}.$FI {sizes}\r\n".encode()
        + block
        + b"%d\r\n" % i
        for i in range(2)
    ]
    assert bytes(frames.buffer) == b"".join(expected)
    assert frames.nbytes(0, 2) == len(b"".join(expected))


def test_reply_leads_to_its_message() -> None:
    for reply in replies(encode_batch(numbered(12), INBOX, 5, 3, 10), 3):
        parsed = parse_reply(reply.encode(), INBOX.encode())
        assert parsed is not None
        batch, number = parsed
        assert batch == 5 + 3
        assert reply.split(".")[5] == str(number)


def test_batch_id_is_short() -> None:
    """Servers accept 64 bytes; the largest serials have 18 digits."""
    inbox = f"_INBOX.{'x' * 22}."
    (reply,) = replies(encode_batch(numbered(1), inbox, 999_999 * 10**12 + 10**11, 0, 1))
    assert len(reply.split(".")[2]) <= 64


@pytest.mark.parametrize("operation", [END, PING])
def test_frame_that_is_not_stored(operation: int) -> None:
    frame = control(operation, "s.7", INBOX, 70, 100, 8)
    assert frame == b"PUB s.7 _INBOX.abc.abc-70.100.fail.8.%d.$FI 0\r\n\r\n" % operation


FOREIGN = [
    b"_INBOX.abc.17",
    b"_INBOX.abc.abc-1.500.fail.1.0.$F",
    b"_INBOX.abc.abc-1.500.fail.1.0.0.$FI",
    b"_INBOX.abc.abc-.500.fail.1.0.$FI",
    b"_INBOX.abc.abc-1.500.fail.x.0.$FI",
    b"_INBOX.xyz.abc-1.500.fail.1.0.$FI",
]


@pytest.mark.parametrize("subject", FOREIGN)
def test_subjects_of_other_kinds(subject: bytes) -> None:
    assert parse_reply(subject, INBOX.encode()) is None


# -- responses, as nats-server 2.14.6 and 2.15.1 send them -----------------------------------------

ACK, ENDED, GAP, ERR = ResponseKind.ACK, ResponseKind.END, ResponseKind.GAP, ResponseKind.ERROR
RESPONSES = [
    (b'{"type":"ack","seq":0,"msgs":500}', BatchResponse(ACK, stored=0, flow=500)),
    (b'{"type":"ack","seq":1500,"msgs":2}', BatchResponse(ACK, stored=1500, flow=2)),
    (b'{"stream":"S","seq":17,"batch":"b","count":9}', BatchResponse(ENDED, stored=9, stream="S")),
    (b'{"stream":"S","seq":0,"batch":"b","count":0}', BatchResponse(ENDED, stream="S")),
    (
        b'{"stream":"S","domain":"d","seq":7,"batch":"b","count":2}',
        BatchResponse(ENDED, stored=2, stream="S"),
    ),
    (b'{"type":"gap","last_seq":4,"seq":5}', BatchResponse(GAP, missing=4)),
    (b'{"type":"err","seq":6,"error":%s}' % ERROR_JSON, BatchResponse(ERR, error=ERROR)),
    (
        b'{"error":%s,"stream":"S","seq":0}' % ERROR_JSON,
        BatchResponse(ERR, stream="S", error=ERROR),
    ),
]


@pytest.mark.parametrize(("payload", "expected"), RESPONSES)
def test_responses(payload: bytes, expected: BatchResponse) -> None:
    assert parse_response(payload) == expected


INVALID = [
    (b"", "Expecting value"),
    (b"[]", "expected a JSON object"),
    (b"{}", "expected a JSON object"),
    (b'{"type":"ack","seq":1}', "expected a JSON object"),
    (b'{"type":"ack","seq":-1,"msgs":1}', "'seq' is -1, expected a natural number"),
    (b'{"type":"gap","seq":5}', "expected a JSON object"),
    (b'{"type":"ack","seq":"1","msgs":1}', "'seq' is '1', expected a natural number"),
    (b'{"type":"err","seq":1,"error":"no"}', "expected a JSON object"),
    # A PubAck of one message, from a server that does not know fast ingest.
    (b'{"stream":"S", "seq":17}', "expected a JSON object with 'type', 'error' or 'count'"),
]


@pytest.mark.parametrize(("payload", "problem"), INVALID)
def test_response_invalid(payload: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_response(payload)
