"""How a stream loses its oldest messages: what a test does to it, and sees done."""

from __future__ import annotations

from typing import Any

from buckets import api
from topology import wait_until

from faults.trial import Trial


def purge(trial: Trial, keep: int) -> None:
    """All but the last ``keep`` messages."""
    api(trial.url, f"STREAM.PURGE.{trial.stream}", {"keep": keep} if keep else {})
    assert trial.state()["messages"] == keep


def limit(trial: Trial, keep: int) -> None:
    """The same by a limit that the stream gets now, and keeps."""
    _update(trial, max_msgs=keep, discard="old")
    wait_until("only so many are left", lambda: trial.state()["messages"] == keep)


def expire(trial: Trial) -> None:
    """Let all that there is grow too old, and what comes then stay."""
    _update(trial, max_age=200_000_000)
    wait_until("all has expired", lambda: trial.state()["messages"] == 0, deadline=120)
    _update(trial, max_age=0)


def _update(trial: Trial, **changed: Any) -> None:
    config = api(trial.url, f"STREAM.INFO.{trial.stream}")["config"]
    api(trial.url, f"STREAM.UPDATE.{trial.stream}", {**config, **changed})
