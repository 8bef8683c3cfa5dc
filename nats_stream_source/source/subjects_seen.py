"""Which subjects were read, and which were not."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from nats_stream_source.wire.columns import subjects
from nats_stream_source.wire.frames import Frames


class SubjectsSeen:
    """A growing set of subjects. Takes the bytes of their names, and no Python object for each."""

    def __init__(self) -> None:
        self._names: list[pa.Array] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, names: pa.Array) -> None:
        """Subjects (``pa.string()``) that differ from each other and from all before."""
        self._names.append(names)
        self._count += len(names)

    def unseen(self, names: pa.Array) -> pa.Array:
        """Whether each of ``names`` is none of these: ``pa.bool_()``."""
        seen = pa.chunked_array(self._names, pa.string())
        # The few are looked for among the many, or a table of the many would be built each time.
        few = seen.filter(pc.is_in(seen, value_set=names))
        return pc.invert(pc.is_in(names, value_set=few))

    def first_sights(self, frames: Frames) -> Frames:
        """The messages of subjects that were not seen, the first one of each, which now are."""
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
        """Those of ``listed`` that were not seen, sorted."""
        names = pa.array(sorted(listed), pa.string())
        unseen: list[str] = names.filter(self.unseen(names)).to_pylist()
        return unseen
