"""Tracks the subjects of received messages, to find the missing ones."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.wire.columns import subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries


class SubjectsSeen:
    """A set of subjects, stored as Arrow strings without a Python object per subject."""

    def __init__(self) -> None:
        self._names: list[pa.Array] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, names: pa.Array) -> None:
        """Add subjects (``pa.string()``) that differ from each other and from all in the set."""
        self._names.append(names)
        self._count += len(names)

    def unseen(self, names: pa.Array) -> pa.Array:
        """For each of ``names``, whether it is not in the set: ``pa.bool_()``."""
        seen = pa.chunked_array(self._names, pa.string())
        # Look the few names up in the set: the reverse would build a hash table of the set each
        # time.
        few = seen.filter(pc.is_in(seen, value_set=names))
        return pc.invert(pc.is_in(names, value_set=few))

    def first_messages(self, frames: Deliveries) -> Deliveries:
        """The first message of each subject that is not in the set; adds these subjects."""
        if not len(frames):
            return frames
        encoded = subjects(frames, replace=True).dictionary_encode()
        names = encoded.dictionary
        new = self.unseen(names)
        self.add(names.filter(new))
        _, first = np.unique(encoded.indices.to_numpy(), return_index=True)
        rows: NDArray[np.intp] = np.sort(first[new.to_numpy(zero_copy_only=False)])
        return frames.select(rows)

    def missing(self, listed: Iterable[str]) -> list[str]:
        """The subjects of ``listed`` that are not in the set, sorted."""
        names = pa.array(sorted(listed), pa.string())
        unseen: list[str] = names.filter(self.unseen(names)).to_pylist()
        return unseen
