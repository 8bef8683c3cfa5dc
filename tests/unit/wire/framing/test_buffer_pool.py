"""Memory is used again once nothing refers to it, and never before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from nats_stream_source.wire.framing.buffer_pool import BufferPool
from nats_stream_source.wire.framing.frames import Framer, Frames

VIEWS: dict[str, Callable[[np.ndarray], Any]] = {
    "the array": lambda array: array,
    "a slice": lambda array: array[3:9],
    "a slice of a slice": lambda array: array[2:][3:9][::2],
    "another type": lambda array: array.view(np.int8),
    "a memoryview": memoryview,
    "a slice of a memoryview": lambda array: memoryview(array)[3:9],
    "an array over a memoryview": lambda array: np.frombuffer(memoryview(array)[3:9], np.uint8),
    "an Arrow buffer": lambda array: pa.py_buffer(memoryview(array)),
    "an Arrow array": lambda array: pa.Array.from_buffers(
        pa.uint8(), 9, [None, pa.py_buffer(array)]
    ),
}


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_memory_in_use_is_not_used_again(view: Callable[[np.ndarray], Any]) -> None:
    pool = BufferPool()
    first = pool.block(1000)
    used = address(first)
    held = view(first)
    del first
    second = pool.block(1000)
    assert address(second) != used
    del held
    third = pool.block(1000)
    assert address(third) == used


def test_table_view_keeps_table() -> None:
    pool = BufferPool()
    row = pool.table(16, 100)[3, 10:20]
    assert not pool._unused
    del row
    assert list(map(len, pool._unused)) == [12800]


def test_table_has_all_columns_of_its_memory() -> None:
    pool = BufferPool()
    del (first := [pool.table(16, 100)])[:]
    assert not first
    table = pool.table(16, 90)
    assert table.shape == (16, 100)
    assert table.dtype == np.int64
    assert table.flags.c_contiguous


def test_unused_memory_is_bounded() -> None:
    pool = BufferPool(keep=2)
    blocks = [pool.block(1000 + i) for i in range(5)]
    del blocks
    assert len(pool._unused) == 2


@pytest.mark.parametrize("size", [1, 249, 1001])
def test_memory_of_another_size_is_dropped(size: int) -> None:
    pool = BufferPool()
    pool.block(1000)
    assert len(pool.block(size)) == size
    assert list(map(len, pool._unused)) == [size]


def test_frames_that_are_held_keep_their_bytes() -> None:
    """Many blocks are received while some frames of earlier ones are held, at random."""
    chance = random.Random(3)
    line = b"MSG a 1 8000\r\n%08d" + b"x" * 7992 + b"\r\n"
    stream = memoryview(b"".join(line % serial for serial in range(12_000)))
    framer, position = Framer(), 0
    held: list[tuple[Frames, bytes]] = []
    blocks: list[int] = []
    while position < len(stream):
        room = framer.room()
        piece = stream[position : position + len(room)]
        room[: len(piece)] = piece
        position += len(piece)
        framer.received(len(piece))
        del room
        frames = framer.frames()
        if (block := address(np.frombuffer(frames.buffer, np.uint8))) not in blocks[-1:]:
            blocks.append(block)
        index = chance.randrange(len(frames))
        held.append((frames.select(slice(index, index + 1)), frames.payload(index)))
        chance.shuffle(held)
        del held[6:]
        for one, payload in held:
            assert one.payload(0) == payload
    assert len(blocks) > 20
    assert len(set(blocks)) < len(blocks)  # blocks were used again
