"""The entries that a follower has read and not merged yet, and the position behind those taken."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from nats_stream_source.rows.endless import Arrived


@dataclass(slots=True)
class Buffer:
    """Entries in their order.

    Attributes:
        max_rows, max_bytes: limits of what is taken at a time; None for no limit.
        sequence: the last stream sequence of the entries that were taken.
        time: its time in nanoseconds since 1970; None if it is not known.
        nbytes: size of the entries that wait.
    """

    max_rows: int | None
    max_bytes: int | None
    sequence: int = 0
    time: int | None = None
    nbytes: int = 0
    _waiting: deque[Arrived] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, arrived: Arrived) -> None:
        """Add entries that have arrived."""
        self._waiting.append(arrived)
        self.nbytes += arrived.rows.nbytes

    def take(self) -> list[pa.RecordBatch]:
        """The next entries, within the limits of a commit; at least one if there are any."""
        taken: list[pa.RecordBatch] = []
        rows = nbytes = 0
        while self._waiting:
            batch, messages = self._waiting[0].rows, self._waiting[0].messages
            left = batch.num_rows if self.max_rows is None else self.max_rows - rows
            if self.max_bytes is not None and batch.nbytes:
                share = (self.max_bytes - nbytes) * batch.num_rows // batch.nbytes
                left = min(left, max(share, 0 if rows else 1))
            if left <= 0 and batch.num_rows:
                break
            if left < batch.num_rows:
                self._waiting[0] = Arrived(batch.slice(left), messages)
                batch = batch.slice(0, left)
                last = int(np.searchsorted(messages.stream_seq, batch["revision"][-1].as_py()))
            else:
                self._waiting.popleft()
                last = -1
            taken.append(batch)
            rows, nbytes = rows + batch.num_rows, nbytes + batch.nbytes
            self.nbytes -= batch.nbytes
            self.sequence = int(messages.stream_seq[last])
            self.time = int(messages.time[last])
        return taken
