"""Frames to Arrow columns, and reply subjects that are invalid."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire import arrow_slices
from nats_stream_source.wire.columns import (
    entry_operations,
    header_blocks,
    payloads,
    subjects,
    within,
)
from nats_stream_source.wire.consumer.deliveries import Deliveries, is_delivery
from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.frames import Framer, Frames
from nats_stream_source.wire.headers import operations
from tests.unit.wire.reference.streams import using
from tests.unit.wire.test_headers import OPERATIONS

BLOCK = b"NATS/1.0\r\nA: b\r\n\r\n"
V1 = b"$JS.ACK.KV_fleet.con_1.2.1007.33.1732150000123456789.44"
V2 = b"$JS.ACK.hub.x2eAcc0uNt.KV_fleet.con_1.3.1008.34.1732150000123456790.43"


def msg(subject: bytes, payload: bytes = b"x", reply: bytes = b"", header: bytes = b"") -> bytes:
    words = [b"HMSG" if header else b"MSG", subject, b"7", *([reply] if reply else [])]
    words += [b"%d" % len(header)] if header else []
    words += [b"%d" % (len(header) + len(payload))]
    return b" ".join(words) + b"\r\n" + header + payload + b"\r\n"


def frames_of(*parts: bytes) -> Frames:
    framer = Framer()
    frames = framer.feed(b"".join(parts))
    assert framer.pending == 0
    return frames


def with_replies(*replies: bytes) -> Frames:
    return frames_of(*(msg(b"$KV.fleet.k", reply=reply) for reply in replies))


MIXED = frames_of(
    b"PING\r\n",
    msg(b"$KV.fleet.a", b"one", V1),
    msg(b"$KV.fleet.b", b"", V2, BLOCK),
    msg("kv.ü".encode(), b"\x00\xff\r\n", b"_INBOX.1"),
    msg(b"c", b"three"),
)


def test_columns() -> None:
    assert subjects(MIXED).equals(pa.array(["", "$KV.fleet.a", "$KV.fleet.b", "kv.ü", "c"]))
    assert payloads(MIXED).equals(
        pa.array([b"", b"one", b"", b"\x00\xff\r\n", b"three"], pa.binary())
    )
    assert header_blocks(MIXED).equals(pa.array([b"", b"", BLOCK, b"", b""], pa.binary()))
    assert is_delivery(MIXED).tolist() == [False, True, True, False, False]
    for column in (subjects(MIXED), payloads(MIXED), header_blocks(MIXED)):
        column.validate(full=True)


@pytest.mark.parametrize("index", [[1, 4], [4, 2, 2, 0], [3], []])
def test_columns_of_selection_in_any_order(index: list[int]) -> None:
    chosen = MIXED.select(np.array(index, np.int64))
    for column in (subjects, payloads, header_blocks):
        result = column(chosen)
        result.validate(full=True)
        assert result.to_pylist() == [column(MIXED)[i].as_py() for i in index]


def test_columns_do_not_hold_buffer() -> None:
    frames = frames_of(msg(b"a", bytes(100_000)), msg(b"b", b"small")).select(slice(1, 2))
    assert payloads(frames).get_total_buffer_size() < 1000


def operation_names(frames: Frames) -> list[str]:
    found = entry_operations(frames)
    if found is None:
        return ["PUT"] * len(frames)
    assert found.type == pa.string()
    return list(found.to_pylist())


HEADER_BLOCKS = [raw or b"" for raw, _ in OPERATIONS]


@pytest.mark.parametrize("way", scanner.available())
def test_entry_operations(way: scanner.Scanner) -> None:
    expected = [operation for _, operation in OPERATIONS]
    frames = frames_of(*(msg(b"a", b"x\r\nKV-Operation: DEL", V1, raw) for raw in HEADER_BLOCKS))
    with using(way):
        assert entry_operations(frames) is not None
        assert operation_names(frames) == expected
        index = np.array([i for i, operation in enumerate(expected) if operation == "PUT"])
        # Blocks that only look like those of markers.
        assert operation_names(frames.select(index)) == ["PUT"] * len(index)
        assert entry_operations(frames_of(msg(b"a", b"\nKV-Operation: DEL"))) is None
        assert entry_operations(Framer().feed(b"")) is None


LINES = [b"NATS/1.0", b"\r\n", b"\n", b"KV-Operation", b"KV-Opera", b": DEL", b": MaxAge", b"x"]
LINES += [b"Nats-Marker-Reason", b"K"]
LINE_LISTS = st.lists(st.lists(st.sampled_from(LINES), max_size=9).map(b"".join), max_size=6)


@given(LINE_LISTS)
def test_entry_operations_random(blocks: list[bytes]) -> None:
    frames = frames_of(*(msg(b"a", b"x", V1, raw) for raw in blocks))
    expected = operations(pa.array(blocks, pa.binary())).to_pylist()
    for way in scanner.available():
        with using(way):
            assert operation_names(frames) == expected


def test_frames_empty() -> None:
    none = Framer().feed(b"")
    assert subjects(none).type == pa.string()
    assert payloads(none).type == header_blocks(none).type == pa.binary()
    assert is_delivery(none).dtype == np.bool_
    assert len(is_delivery(none)) == len(Deliveries.of(none)) == len(subjects(none)) == 0


def test_subject_not_utf8() -> None:
    with pytest.raises(ProtocolError, match=r"b'kv\.\\xff' is not UTF-8"):
        subjects(frames_of(msg(b"ok"), msg(b"kv.\xff")))
    with pytest.raises(ProtocolError, match=r"b'kv\.\\xff' is not UTF-8"):
        subjects(frames_of(msg(b"kv.ok"), msg(b"kv.\xff")), after="kv.")


def test_too_much_for_one_array() -> None:
    frames = frames_of(*(msg(b"a", bytes(1000)) for _ in range(5)))
    with mock.patch.object(arrow_slices, "_MAX_BYTES", 2100):
        # Whole frames count, not the buffer that they lie in.
        assert len(payloads(frames.select(slice(3, 5)))) == 2
        with pytest.raises(
            OverflowError,
            match="5 frames have 5080 bytes, expected at most 2100; build columns of fewer frames",
        ):
            payloads(frames)


@pytest.mark.parametrize(
    ("reply", "delivery"),
    [
        (V1, True),
        (V2, True),
        (b"$JS.ACK.", True),
        (b"$JS.ACK.x", True),
        (b"$JS.ACK", False),
        (b"$JS.ACKS.a", False),
        (b"$JS.FC.KV_fleet.con.abc", False),
        (b"$js.ack.KV_fleet", False),
        (b"_INBOX.abcdefgh.1", False),
        (b"r", False),
        (b"", False),
    ],
)
def test_delivery_is_recognised(reply: bytes, delivery: bool) -> None:
    assert is_delivery(with_replies(reply)).tolist() == [delivery]
    assert is_delivery(with_replies(V1, reply, V1)).tolist() == [True, delivery, True]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (b"$JS.ACK.S.C.1.2.3.4", "8 tokens"),
        (b"$JS.ACK.S.C.1.2.3.4.5.6", "10 tokens"),
        (b"$JS.ACK.S.C.1.x.3.4.5", "'x' is not an integer"),
        (b"$JS.ACK.S.C.1.2.3.4.", "'' is not an integer"),
        (b"$JS.ACK.S.C..2.3.4.5", "'' is not an integer"),
        (b"$JS.ACK.S.C.1.-2.3.4.5", "'-2' is not an integer"),
        (b"$JS.ACK.S.C.1.2.0x3.4.5", "'0x3' is not an integer"),
        (b"$JS.ACK.S.C.1.9223372036854775808.3.4.5", "not an integer"),
        (b"$JS.ACK.S.C.1.2.3.4.\xff", "not an integer"),
        (b"$JS.ACK.D.A.S.C.1.2.3.4.x", "'x' is not an integer"),
        (b"$JS.ACKS.S.C.1.2.3.4.5", "does not start with"),
        (b"", "does not start with"),
    ],
)
def test_bad_numbers(reply: bytes, text: str) -> None:
    for replies in ([reply], [V1, V2, reply, V1]):
        with pytest.raises(ProtocolError, match=text) as caught:
            Deliveries.of(with_replies(*replies))
        assert repr(reply.decode(errors="replace")) in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text("abc.ü$", min_size=1, max_size=5),
            st.binary(max_size=30),
            st.sampled_from([b"", V1, b"_INBOX.1"]),
            st.sampled_from([b"", BLOCK]),
        ),
        max_size=20,
    )
)
def test_columns_random(drawn: list[tuple[str, bytes, bytes, bytes]]) -> None:
    frames = frames_of(*(msg(s.encode(), p, r, h) for s, p, r, h in drawn))
    assert subjects(frames).to_pylist() == [s for s, _, _, _ in drawn]
    assert payloads(frames).to_pylist() == [p for _, p, _, _ in drawn]
    assert header_blocks(frames).to_pylist() == [h for _, _, _, h in drawn]
    assert is_delivery(frames).tolist() == [r == V1 for _, _, r, _ in drawn]


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["$KV.b.x", "$KV.b.y"], [0, 1]),
        (["$KV.b.x", "$KV.c.y", "$KV.b.", "$KV.b", "o"], [0, 2]),
        (["o"], []),
        ([], []),
    ],
)
def test_frames_within_prefix(names: list[str], kept: list[int]) -> None:
    data = b"".join(b"MSG %s 1 0\r\n\r\n" % name.encode() for name in names)
    frames = Framer().feed(data)
    assert subjects(within(frames, "$KV.b.")).to_pylist() == [names[row] for row in kept]
    assert within(frames, "") is frames
    assert (within(frames, "$KV.b.") is frames) == (len(kept) == len(names))
