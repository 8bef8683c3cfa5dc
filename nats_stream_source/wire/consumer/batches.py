"""Batches of bounded size from deliveries, so that a reader's memory is bounded.

Deliveries arrive in runs of any length. A batch is full at ``max_rows`` rows or ``max_bytes`` bytes
of frames and numbers, whichever comes first. A single larger frame is a batch of its own.

A batch that lies in one buffer is not copied, so a batch that is large enough is also full where
another buffer starts. A few frames in a large buffer are copied out of it, so that the memory in
use is never much larger than the frames themselves.
"""

from __future__ import annotations

from collections import deque

from nats_stream_source.wire.consumer.deliveries import Deliveries

_LARGE_ENOUGH = 256 << 10  # bytes of a batch that may end at a buffer border
_SPARSE = 4  # a buffer is released if its frames fill less than 1 / _SPARSE of it


class Batcher:
    """Collects deliveries and returns them in order, one batch at a time."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._runs: deque[Deliveries] = deque()
        self._rows = 0
        self._bytes = 0

    def add(self, rows: Deliveries) -> None:
        """Append deliveries."""
        if self._runs and self._runs[-1].buffer is not rows.buffer:
            self._release_sparse_buffer()
        self._runs.append(rows)
        self._rows += len(rows)
        self._bytes += rows.size

    def pop_full(self) -> Deliveries | None:
        """Remove and return the next full batch; None if the frames do not fill one."""
        if self._rows >= self._max_rows or self._bytes >= self._max_bytes:
            return self._next_batch()
        if self._runs and self._runs[0].buffer is not self._runs[-1].buffer:
            first = self._runs[0].buffer
            complete = sum(run.nbytes for run in self._runs if run.buffer is first)
            return self._next_batch() if complete >= _LARGE_ENOUGH else None
        return None

    def pop(self) -> Deliveries | None:
        """Remove and return the next batch, full or not; None if no frames remain."""
        return self._next_batch() if self._rows else None

    def _release_sparse_buffer(self) -> None:
        """Copy the frames out of the last buffer, which is complete, if they fill little of it."""
        runs: list[Deliveries] = []
        while self._runs and (not runs or self._runs[-1].buffer is runs[0].buffer):
            runs.insert(0, self._runs.pop())
        size = sum(run.nbytes for run in runs)
        if size < min(_LARGE_ENOUGH, len(runs[0].buffer) / _SPARSE):
            runs = [Deliveries.join(runs)]
        self._runs.extend(runs)

    def _next_batch(self) -> Deliveries:
        batch: list[Deliveries] = []
        rows = size = nbytes = 0
        while self._runs and rows < self._max_rows and size < self._max_bytes:
            if nbytes >= _LARGE_ENOUGH and self._runs[0].buffer is not batch[-1].buffer:
                break
            run = self._runs.popleft()
            fitting = run.fitting(self._max_bytes - size)
            fitting = max(min(fitting, self._max_rows - rows), 0 if rows else 1)
            if fitting < len(run):
                self._runs.appendleft(run.select(slice(fitting, len(run))))
                run = run.select(slice(0, fitting))
            if not fitting:
                break
            batch.append(run)
            rows += fitting
            size += run.size
            nbytes += run.nbytes
        self._rows -= rows
        self._bytes -= size
        return Deliveries.chain(batch)
