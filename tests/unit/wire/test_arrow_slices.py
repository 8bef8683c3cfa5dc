"""Slices as Arrow arrays: both ways give the same, and the compiled one stays within its memory."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nats_stream_source.wire.arrow_slices import slices
from nats_stream_source.wire.framing import scanner
from tests.unit.wire.framing.test_scanner import needs_compiled, run
from tests.unit.wire.reference.streams import using

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
        "from tests.unit.wire.reference.guarded import GuardedBlock\n"
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
