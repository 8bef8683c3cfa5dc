"""The rule's reader of a table that Spark reads: the rows of one set of keys, collected once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from nats_stream_source.delta.rules.rows import Integers, key_codes, positions_in
from nats_stream_source.delta.spark.batch import ONCE_BYTES


class RowsOfKeys:
    """A :class:`nats_stream_source.delta.rules.rows.Reader` of the rows of one set of keys.

    The rows can be of several versions, since the MERGE compares each with what was read of it.

    Args:
        read: returns columns of the rows of keys, see :meth:`SparkTable.rows_of_keys`.
        columns: what is read of each row.
        events: whose sizes are those that their rows are taken to have.
    """

    def __init__(
        self,
        read: Callable[[pa.Table, Sequence[str], Sequence[str]], pa.Table],
        keys: Sequence[str],
        columns: Sequence[str],
        events: pa.Table,
    ) -> None:
        self._read, self._keys, self._events = read, list(keys), events
        self._columns = list(columns)
        self._rows: pa.Table | None = None

    def rows(self, keys: pa.Table) -> pa.Table:
        """The rows; the first call reads those of its keys, see :meth:`Reader.of_keys`.

        They are read in steps: the driver's JVM holds one of them.
        """
        if self._rows is None:
            of, columns = self._events, self._columns
            size = of.select([name for name in of.column_names if name in columns]).nbytes
            steps = 1 + size * len(keys) // (max(1, len(of)) * ONCE_BYTES)
            step = np.zeros(len(keys), int) if steps == 1 else key_codes(keys, self._keys) % steps
            self._rows = pa.concat_tables(
                self._read(keys.filter(pa.array(step == n)), self._keys, columns)
                for n in range(steps)
            )
        return self._rows

    def find(self, keys: pa.Table) -> Integers:
        """See :meth:`Reader.find`."""
        return positions_in(keys, self.rows(keys), self._keys)

    def of_keys(self, keys: pa.Table) -> Integers:
        """See :meth:`Reader.of_keys`."""
        return np.flatnonzero(positions_in(self.rows(keys), keys, self._keys) >= 0)

    def read(self, slots: Integers, columns: Sequence[str]) -> pa.Table:
        """See :meth:`Reader.read`."""
        assert self._rows is not None  # the slots are of its rows
        at = pa.array(np.maximum(slots, 0), mask=slots < 0)
        return self._rows.select(list(columns)).take(at)
