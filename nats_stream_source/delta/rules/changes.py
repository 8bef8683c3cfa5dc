"""The changes of a batch by the SCD type of the table, and the check of the events before.

Pure: Arrow in, Arrow out. An executor gives :func:`changes_of` a reader of the table and one of its
state table (:mod:`rows`), and applies the changes that come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.delta.rules.history import history_changes
from nats_stream_source.delta.rules.latest import latest_changes, with_kept_values
from nats_stream_source.delta.rules.layout import ORDER_COLUMNS, REPLACES, UNAVAILABLE, Layout
from nats_stream_source.delta.rules.reconciled import reconciled_changes
from nats_stream_source.delta.rules.rows import Reader, RowChanges, has_null, sequence_parts
from nats_stream_source.errors import ConfigurationError
from nats_stream_source.wire.headers import OPERATIONS


def changes_of(
    events: pa.Table, layout: Layout, tracked: Sequence[str], rows: Reader, state: Reader | None
) -> RowChanges:
    """The changes that valid events make; see :mod:`latest`, :mod:`history`, :mod:`reconciled`.

    Args:
        events: see :mod:`nats_stream_source.delta.rules.events`, in any order.
        tracked: with SCD type 2, the columns whose changes make a version, see :mod:`history`.
        state: reads the state table; None if the layout does not have one.
    """
    if REPLACES in events.column_names:
        return reconciled_changes(events, layout, rows)
    if UNAVAILABLE in events.column_names:
        events = with_kept_values(events, layout, rows)
    if layout.scd_type == 2:
        assert state is not None
        return history_changes(events, layout, tracked, rows, state)
    return latest_changes(events, layout, rows, state)


def invalid_events(events: pa.Table, layout: Layout, order: Sequence[str]) -> np.ndarray:
    """Whether each event cannot be ordered or applied.

    A key or a part of the sequence is null, or the operation of an entry is null or unknown.

    Args:
        order: the columns with the sequence.
    """
    invalid = has_null(events, list(dict.fromkeys((*layout.keys, *order))))
    if layout.entries:
        known = pc.is_in(events["operation"], pa.array(OPERATIONS, pa.string()))  # false for a null
        invalid |= ~np.asarray(known.to_numpy(), bool)
    return invalid


def require_valid(events: pa.Table, layout: Layout, count: int | None = None) -> None:
    """Raise ConfigurationError if there are invalid events.

    Args:
        count: how many invalid events the batch has, if these are a part of it.
    """
    at = np.flatnonzero(invalid_events(events, layout, layout.order))
    if not len(at):
        return
    count = count or len(at)
    if layout.entries:
        columns = ", ".join((*layout.keys, *ORDER_COLUMNS, "operation"))
        raise ConfigurationError(
            f"could not merge the batch: {count} entries have a null in one of {columns}, or an "
            f"operation other than {', '.join(OPERATIONS)}; keep these columns as the source "
            f"delivers them"
        )
    event = events.slice(int(at[0]), 1)
    parts = [*layout.keys, *sequence_parts(event, layout.order).column_names]
    values = {**event.select(list(layout.keys)).to_pylist()[0]}
    values |= sequence_parts(event, layout.order).to_pylist()[0]
    row = ", ".join(f"{name}={values[name]!r}" for name in dict.fromkeys(parts))
    raise ConfigurationError(
        f"could not merge the batch: {count} events have a null in a key or in the sequence, the "
        f"first of them has {row}; filter these events, or correct keys or sequence_by"
    )
