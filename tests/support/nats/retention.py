"""How a stream loses its oldest messages: what a test does to it, and sees done."""

from __future__ import annotations

from typing import Any

from tests.support.nats.buckets import api
from tests.support.wait import wait_until
from tests.support.workload import Workload


def purge(workload: Workload, keep: int) -> None:
    """All but the last ``keep`` messages."""
    api(workload.url, f"STREAM.PURGE.{workload.stream}", {"keep": keep} if keep else {})
    assert workload.state()["messages"] == keep


def limit(workload: Workload, keep: int) -> None:
    """The same by a limit that the stream gets now, and keeps."""
    _update(workload, max_msgs=keep, discard="old")
    wait_until(lambda: workload.state()["messages"] == keep, "only so many are left")


def expire(workload: Workload) -> None:
    """Let all that there is grow too old, and what comes then stay."""
    _update(workload, max_age=200_000_000)
    wait_until(lambda: workload.state()["messages"] == 0, "all has expired", deadline=120)
    _update(workload, max_age=0)


def _update(workload: Workload, **changed: Any) -> None:
    config = api(workload.url, f"STREAM.INFO.{workload.stream}")["config"]
    api(workload.url, f"STREAM.UPDATE.{workload.stream}", {**config, **changed})
