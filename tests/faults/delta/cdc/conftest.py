"""The fixtures of tests/integration/delta/cdc, for its fault tests."""

from tests.integration.delta.cdc.conftest import engine_options, event_frame, merge_events

__all__ = ["engine_options", "event_frame", "merge_events"]
