"""The fixtures of tests/integration/delta, for the fault tests of tables."""

from tests.integration.delta.conftest import (
    bucket,
    engine,
    frame,
    merge,
    next_engine,
    reconciled,
    table,
)

__all__ = ["bucket", "engine", "frame", "merge", "next_engine", "reconciled", "table"]
