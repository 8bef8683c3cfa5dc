"""Frames to Arrow columns, and back; slices as Arrow arrays, also where memory ends."""

from __future__ import annotations

import sys
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from nats_stream_source.errors import ProtocolError
from nats_stream_source.wire import arrow_slices
from nats_stream_source.wire.arrow_slices import slices
from nats_stream_source.wire.columns import (
    entry_operations,
    header_blocks,
    payloads,
    subjects,
    within,
)
from nats_stream_source.wire.consumer.deliveries import (
    Deliveries,
    Delivery,
    encode_deliveries,
    is_delivery,
)
from nats_stream_source.wire.framing import scanner
from nats_stream_source.wire.framing.frames import Framer, Frames
from nats_stream_source.wire.headers import operations
from tests.unit.wire.consumer.test_messages import INVALID_REPLIES
from tests.unit.wire.framing.test_scanner import needs_compiled, run
from tests.unit.wire.reference import streams
from tests.unit.wire.reference.streams import using
from tests.unit.wire.test_headers import OPERATIONS

BLOCK = b"NATS/1.0\r\nA: b\r\n\r\n"
V1 = b"$JS.ACK.KV_fleet.con_1.2.1007.33.1732150000123456789.44"
V2 = b"$JS.ACK.hub.x2eAcc0uNt.KV_fleet.con_1.3.1008.34.1732150000123456790.43"


def msg(subject: bytes, payload: bytes = b"x", reply: bytes = b"", header: bytes = b"") -> bytes:
    return streams.msg(subject, 7, payload, reply, header)


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
        assert len(payloads(frames.select(slice(3, 5)))) == 2
        with pytest.raises(
            OverflowError,
            match="5 slices have 5000 bytes, expected at most 2100; build columns of fewer frames",
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
    ("subject", "text"), [one for one in INVALID_REPLIES if one[1] != "name is empty"]
)
def test_bad_numbers(subject: str, text: str) -> None:
    reply = subject.encode(errors="surrogateescape")
    for replies in ([reply], [V1, V2, reply, V1]):
        with pytest.raises(ProtocolError, match=text) as caught:
            Deliveries.of(with_replies(*replies))
        assert repr(reply.decode(errors="replace"))[:100] in str(caught.value)


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


ways = pytest.mark.parametrize("way", scanner.available())


@st.composite
def fields(draw: st.DrawFn) -> tuple[bytes, list[int], list[int], bytes]:
    """Slices of a buffer with bytes between them; they all start with the prefix."""
    prefix = draw(st.sampled_from([b"", b"a", b"$KV.fleet."]))
    buffer, begin, end = draw(st.binary(max_size=40)), [], []
    for rest in draw(st.lists(st.binary(max_size=70), max_size=6)):
        begin.append(len(buffer))
        buffer += prefix + rest
        end.append(len(buffer))
        buffer += draw(st.binary(max_size=40))
    return buffer, begin, end, prefix


def positions(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@given(fields())
def test_slices_random(drawn: tuple[bytes, list[int], list[int], bytes]) -> None:
    buffer, begin, end, prefix = drawn
    expected = [buffer[b + len(prefix) : e] for b, e in zip(begin, end, strict=True)]
    for way in scanner.available():
        with using(way):
            found = slices(buffer, positions(begin), positions(end), pa.binary(), prefix)
        found.validate(full=True)
        assert found.to_pylist() == expected
        assert found.null_count == 0


@ways
def test_positions_may_have_stride(way: scanner.Scanner) -> None:
    both = positions([0, 1, 2, 4, 4, 4])
    with using(way):
        assert slices(b"abcd", both[::2], both[1::2], pa.binary()).to_pylist() == [b"a", b"cd", b""]


@ways
@pytest.mark.parametrize("end", [[2, 4], [2, 5], [1, 4]])
def test_slice_without_prefix(way: scanner.Scanner, end: list[int]) -> None:
    with using(way), pytest.raises(ValueError, match="a slice does not start with b'ab'"):
        slices(b"abac.", positions([0, 2]), positions(end), pa.binary(), b"ab")


@needs_compiled
@pytest.mark.parametrize(
    ("begin", "end", "room", "copied"),
    [
        ([0, 3], [3, 6], 6, 2),
        ([0, 3], [3, 7], 7, 1),  # the buffer ends
        ([0, 3], [3, 6], 5, 1),  # the memory ends
        ([3, -1], [6, 2], 6, 1),
        ([3, 6], [6, 3], 6, 1),
        ([7], [7], 0, 0),
        ([6], [6], 0, 1),
    ],
)
def test_copy_ends_before_slice_outside_memory(
    begin: list[int], end: list[int], room: int, copied: int
) -> None:
    # The memory after the slices must stay as it is.
    memory = np.full(room + 64, 7, np.uint8)
    offsets = np.empty(len(begin) + 1, np.int32)
    arguments = (positions(begin), positions(end), b"", offsets, memory[:room])
    assert scanner.compiled_slices.copy(b"abcdef", *arguments) == copied
    assert (memory[room:] == 7).all()


@needs_compiled
def test_arrays_of_other_lengths_are_refused() -> None:
    one, two = positions([0]), positions([0, 0])
    data = np.empty(0, np.uint8)
    for begin, end, offsets in ((one, two, 2), (two, one, 3), (one, one, 1), (one, one, 3)):
        with pytest.raises(ValueError, match="could not copy slices: "):
            scanner.compiled_slices.copy(b"a", begin, end, b"", np.empty(offsets, np.int32), data)


@needs_compiled
@pytest.mark.parametrize(
    ("begin", "end", "found"), [([-1], [3], 1), ([3], [2], 1), ([0], [9], 1), ([0], [1], 2)]
)
def test_search_outside_buffer_is_refused(begin: list[int], end: list[int], found: int) -> None:
    result = np.empty(found, np.uint8)
    arguments = (positions(begin), positions(end), b"ab", b"cd", result)
    with pytest.raises(ValueError, match="could not search slice"):
        scanner.compiled_slices.find_lines(b"\nabcdef.", *arguments)


@needs_compiled
@pytest.mark.skipif(sys.platform == "win32", reason="guarded pages are those of POSIX")
def test_memory_outside_is_not_accessed() -> None:
    """Slices at each distance from the ends of guarded memory, of a length around the short one."""
    code = (
        "import numpy as np\n"
        "from nats_stream_source.wire.framing.scanner import compiled_slices\n"
        "from tests.unit.wire.reference.fuzz_scanners import GuardedBlock\n"
        "source, target = GuardedBlock(4096), GuardedBlock(4096)\n"
        "offsets = np.empty(2, np.int32)\n"
        "for size in range(1, 80):\n"
        "    text = bytes(range(size))\n"
        "    for begin in range(size):\n"
        "        for way in ('at_start', 'at_end'):\n"
        "            data = np.frombuffer(getattr(target, way)(bytes(size - begin)), np.uint8)\n"
        "            first, last = np.array([begin]), np.array([size])\n"
        "            buffer = getattr(source, way)(text)\n"
        "            assert compiled_slices.copy(buffer, first, last, b'', offsets, data) == 1\n"
        "            assert data.tobytes() == text[begin:]\n"
        "text, found = b'\\n' * 9 + b'abcd', np.empty(1, np.uint8)\n"
        "for begin in range(len(text)):\n"
        "    for end in range(begin, len(text) + 1):\n"
        "        for way in ('at_start', 'at_end'):\n"
        "            first, last = np.array([0]), np.array([end - begin])\n"
        "            buffer = getattr(source, way)(text[begin:end])\n"
        "            compiled_slices.find_lines(buffer, first, last, b'abcd', b'\\n\\nab', found)\n"
        "            part = text[begin:end]\n"
        "            assert found[0] == (b'\\nabcd' in part or b'\\n\\n\\nab' in part)\n"
    )
    run(code)


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
