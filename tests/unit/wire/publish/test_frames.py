"""Frames of a client: encoded as columns, they are what one message at a time would be."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.wire.publish import frames as module
from nats_stream_source.wire.publish.frames import MessageColumns, encode

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
    assert repr(messages) == f"<MessageColumns 2 messages, {len(BLOCK) + 3} bytes>"


def test_messages_exceed_arrow_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    with pytest.raises(OverflowError, match=r"could not encode 2 messages: .* publish fewer"):
        encode(columns([("a", b"x" * 30, None)] * 2), "r.", 1)
