"""Frames in, batches of bounded size out: what keeps a reader's memory bounded.

Frames come in runs of any length. A batch is full at ``most_rows`` frames or ``most_bytes`` bytes,
whichever comes first; a frame that is larger alone is a batch of its own.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from nats_stream_source.wire.frames import Frames


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

    def _cut(self) -> Frames:
        batch: list[Frames] = []
        rows = size = 0
        while self._runs and rows < self._most_rows and size < self._most_bytes:
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
        return Frames.join(batch)
