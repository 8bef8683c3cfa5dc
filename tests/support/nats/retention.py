"""How a stream loses its oldest messages: what a test does to it, and sees done."""

from __future__ import annotations

from typing import Any

from tests.support.nats.buckets import api
from tests.support.recorded_stream import RecordedStream
from tests.support.wait import wait_until


def purge(recorded: RecordedStream, keep: int) -> None:
    """All but the last ``keep`` messages."""
    api(recorded.url, f"STREAM.PURGE.{recorded.stream}", {"keep": keep} if keep else {})
    assert recorded.state()["messages"] == keep


def limit(recorded: RecordedStream, keep: int) -> None:
    """The same by a limit that the stream gets now, and keeps."""
    _update(recorded, max_msgs=keep, discard="old")
    wait_until(lambda: recorded.state()["messages"] == keep, "only so many are left")


def expire(recorded: RecordedStream) -> None:
    """Let all that there is grow too old, and what comes then stay."""
    _update(recorded, max_age=200_000_000)
    wait_until(lambda: recorded.state()["messages"] == 0, "all has expired", deadline=120)
    _update(recorded, max_age=0)


def _update(recorded: RecordedStream, **changed: Any) -> None:
    config = api(recorded.url, f"STREAM.INFO.{recorded.stream}")["config"]
    api(recorded.url, f"STREAM.UPDATE.{recorded.stream}", {**config, **changed})
