"""The fixtures of tests/integration/delta, for the fault tests of tables."""

from tests.integration.delta.conftest import (
    bucket,
    engine,
    event_frame,
    frame,
    merge,
    merge_events,
    next_engine,
    reconciled,
    table,
)

__all__ = [
    "bucket",
    "engine",
    "event_frame",
    "frame",
    "merge",
    "merge_events",
    "next_engine",
    "reconciled",
    "table",
]
