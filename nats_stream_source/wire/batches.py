"""Frames in, batches of bounded size out: what keeps a reader's memory bounded.

Frames come in runs of any length. A batch is full at ``most_rows`` frames or ``most_bytes`` bytes,
whichever comes first; a frame that is larger alone is a batch of its own.

Nothing is copied where a batch lies in one buffer, so a batch that is large enough ends where
another buffer begins. Frames that are few in a large buffer are copied
out of it, so that what is kept is never much more than the frames themselves.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from nats_stream_source.wire.frames import Frames

_WORTH_A_BATCH = 1 << 20  # bytes
_SPARSE = 4  # a buffer is let go of when less than one part in so many of it is kept


class Batcher:
    """Collects frames; gives them back in order, one batch at a time."""

    def __init__(self, most_rows: int, most_bytes: int) -> None:
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self._runs: deque[Frames] = deque()
        self._rows = 0
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<Batcher rows={self._rows} bytes={self._bytes}>"

    def add(self, frames: Frames) -> None:
        """Put frames behind those that are there."""
        if self._runs and self._runs[-1].buffer is not frames.buffer:
            self._pack()
        self._runs.append(frames)
        self._rows += len(frames)
        self._bytes += frames.nbytes

    def full(self) -> Frames | None:
        """The next full batch; None while there is not enough for one."""
        if self._rows >= self._most_rows or self._bytes >= self._most_bytes:
            return self._cut()
        return None

    def rest(self) -> Frames | None:
        """The next batch, full or not; None when nothing is left."""
        return self._cut() if self._rows else None

    def _pack(self) -> None:
        """Let go of the last buffer, of which no more frames come, where it is sparsely used."""
        runs: list[Frames] = []
        while self._runs and (not runs or self._runs[-1].buffer is runs[0].buffer):
            runs.insert(0, self._runs.pop())
        if sum(run.nbytes for run in runs) * _SPARSE < len(runs[0].buffer):
            runs = [Frames.join(runs)]
        self._runs.extend(runs)

    def _cut(self) -> Frames:
        batch: list[Frames] = []
        rows = size = 0
        while self._runs and rows < self._most_rows and size < self._most_bytes:
            if size >= _WORTH_A_BATCH and self._runs[0].buffer is not batch[-1].buffer:
                break
            frames = self._runs.popleft()
            sizes = size + np.cumsum(frames.stop - frames.begin)
            fitting = int(np.searchsorted(sizes, self._most_bytes, side="right"))
            fitting = max(min(fitting, self._most_rows - rows), 0 if rows else 1)
            if fitting < len(frames):
                self._runs.appendleft(frames.select(slice(fitting, len(frames))))
            if not fitting:
                break
            batch.append(frames.select(slice(0, fitting)))
            rows += fitting
            size = int(sizes[fitting - 1])
        self._rows -= rows
        self._bytes -= size
        return Frames.chain(batch)
