"""PubAcks as columns: only responses of the learned form are numbers, whatever else arrives."""

from __future__ import annotations

import pytest

from nats_stream_source.wire.framing.frames import Framer, Frames
from nats_stream_source.wire.publish.pub_acks import learn, parse

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
    both = b"HMSG %s4 1 %d %d\r\n%s%s\r\n" % (
        LONG.encode(),
        size,
        size + len(USUAL),
        block,
        USUAL,
    )
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
