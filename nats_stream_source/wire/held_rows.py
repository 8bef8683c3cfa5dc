"""Rows of a list that wait for a missing row before them, so that rows are returned in order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nats_stream_source.wire.frames import Frames


class HeldRows:
    """Frames in the order of arrival, each with its stream sequence.

    Attributes:
        nbytes: size of the frames.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._frames: list[Frames] = []
        self._seqs: list[NDArray[np.int64]] = []

    def __repr__(self) -> str:
        return f"<HeldRows {len(self)} rows, {self.nbytes} bytes>"

    def __len__(self) -> int:
        return sum(map(len, self._frames))

    def add(self, frames: Frames, stream_seq: NDArray[np.int64]) -> None:
        """Hold ``frames``; none of their sequences is held already."""
        if len(frames):
            # Joined, so that a few rows do not keep the whole received block in memory.
            self._frames.append(Frames.join([frames]))
            self._seqs.append(stream_seq)
            self.nbytes += frames.nbytes

    def release(self, through: int) -> Frames:
        """Remove and return the rows up to the sequence ``through``, in rising order."""
        if not self._frames or min(int(seqs[0]) for seqs in self._seqs) > through:
            return Frames.join([])
        frames, seqs = Frames.join(self._frames), np.concatenate(self._seqs)
        order = np.argsort(seqs, kind="stable")
        count = int(np.searchsorted(seqs[order], through, side="right"))
        self._frames, self._seqs, self.nbytes = [], [], 0
        self.add(frames.select(order[count:]), seqs[order[count:]])
        return Frames.join([frames.select(order[:count])])
