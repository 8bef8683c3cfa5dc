"""The changes of a batch by the SCD type of the table, and the check of the events before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from nats_stream_source.delta.cdc.changes import Reader, RowChanges
from nats_stream_source.delta.cdc.history import history_changes
from nats_stream_source.delta.cdc.kept_values import with_kept_values
from nats_stream_source.delta.cdc.latest import latest_changes
from nats_stream_source.delta.cdc.layout import UNAVAILABLE, Layout
from nats_stream_source.delta.newest import has_null, sequence_parts
from nats_stream_source.errors import ConfigurationError


def changes_of(
    events: pa.Table,
    layout: Layout,
    tracked: Sequence[str] | None,
    read_rows: Reader,
    read_state: Reader,
) -> RowChanges:
    """The changes that events make; see :mod:`latest` and :mod:`history`."""
    if UNAVAILABLE in events.column_names:
        events = with_kept_values(events, layout, read_rows)
    if layout.scd_type == 2:
        return history_changes(events, layout, tracked, read_rows, read_state)
    return latest_changes(events, layout, read_rows, read_state)


def require_valid(events: pa.Table, layout: Layout) -> None:
    """Raise ConfigurationError for an event with a null in its key or sequence."""
    invalid = np.flatnonzero(has_null(events, [*layout.keys, *layout.order]))
    if len(invalid):
        raise invalid_event_error(events.slice(int(invalid[0]), 1), len(invalid), layout)


def invalid_event_error(event: pa.Table, count: int, layout: Layout) -> ConfigurationError:
    """The error for events with a null in the key or sequence.

    Args:
        event: one of them.
        count: how many there are.
        layout: of the table.
    """
    parts = [*layout.keys, *sequence_parts(event, layout.order).column_names]
    values = {**event.select(list(layout.keys)).to_pylist()[0]}
    values |= sequence_parts(event, layout.order).to_pylist()[0]
    row = ", ".join(f"{name}={values[name]!r}" for name in dict.fromkeys(parts))
    return ConfigurationError(
        f"could not merge the batch: {count} events have a null in a key or in the sequence, the "
        f"first of them has {row}; filter these events, or correct keys or sequence_by"
    )
