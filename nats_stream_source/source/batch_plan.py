"""What the planner of a batch tells a task. Pure, since every task's process unpickles it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nats_stream_source.source.plan import Plan


class What(Enum):
    """What a task reads of its range.

    ``RANGE``: all that there is of it. ``CURRENT``: the last message of each subject, as new as the
    end of the range at least (``source.current``). ``AS_OF``: the last message of each subject as
    it was at the end of the range (``source.as_of``).
    """

    RANGE = "range"
    CURRENT = "current"
    AS_OF = "as of"


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One task of a batch.

    Attributes:
        history: how many messages of a subject the stream keeps at most; -1 for any number.
        subjects: how many subjects the stream had when this was planned; None where the query reads
            some of them only.
        lasting: whether a subject that has messages keeps its last one, so that their number only
            grows, but for purges through the stream's API: the stream has no limits, and messages
            no TTL.
        newest: whether nothing had been written after the range.
        first_seq: where the stream began when this was planned.
    """

    plan: Plan
    what: What
    history: int
    subjects: int | None
    lasting: bool
    newest: bool
    first_seq: int


def removed_by(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What of a stream's configuration removes messages, but for the history of each subject."""
    reasons = ["max_age"] if (config.get("max_age") or 0) > 0 else []
    if config.get("discard", "old") == "old":
        reasons += [name for name in ("max_bytes", "max_msgs") if (config.get(name) or -1) > 0]
    if config.get("allow_msg_ttl"):
        reasons.append("TTLs")
    return tuple(reasons)
