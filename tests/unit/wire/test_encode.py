"""Stored messages as frames, without a server."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.wire.consumer.deliveries import is_delivery
from nats_stream_source.wire.encode import Delivery, encode_deliveries

BLOCKS = st.sampled_from([b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\nA: MSG\r\n\r\n"])
MESSAGES = st.lists(
    st.builds(
        Delivery,
        subject=st.sampled_from(["$KV.b.k", "$KV.b.ä", "x"]),
        stream_seq=st.integers(1, 2**62),
        timestamp_ns=st.integers(0, 2**62),
        headers=BLOCKS,
        payload=st.binary(max_size=40) | st.sampled_from([b"\r\nMSG a 1 1\r\n", b"\r\n"]),
    ),
    max_size=12,
)


@given(messages=MESSAGES)
def test_values_roundtrip(messages: list[Delivery]) -> None:
    frames = encode_deliveries("KV_b", messages)
    assert len(frames) == len(messages)
    if not messages:
        return
    assert is_delivery(frames).all()
    again = [
        Delivery(
            frames.subject(i).decode(),
            int(frames.stream_seq[i]),
            int(frames.time[i]),
            frames.header(i),
            frames.payload(i),
        )
        for i in range(len(frames))
    ]
    assert again == messages
    assert frames.consumer_seq.tolist() == list(range(1, len(messages) + 1))
    assert frames.pending.tolist() == list(range(len(messages)))[::-1]
