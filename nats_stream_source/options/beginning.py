"""Where a query begins, in JetStream's own words: the deliver policies of its consumers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DeliverPolicy(str, Enum):
    """JetStream's deliver policies; the value is the name on the wire."""

    ALL = "all"
    NEW = "new"
    LAST = "last"
    LAST_PER_SUBJECT = "last_per_subject"
    BY_START_SEQUENCE = "by_start_sequence"
    BY_START_TIME = "by_start_time"


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a query without a checkpoint begins.

    Attributes:
        sequence: the first stream sequence, with ``by_start_sequence``.
        time: nanoseconds since 1970, with ``by_start_time``: the first message of this time or
            later.
    """

    policy: DeliverPolicy = DeliverPolicy.ALL
    sequence: int | None = None
    time: int | None = None

    @classmethod
    def at(cls, sequence: int | None, time: int | None) -> Beginning | None:
        """At a sequence or a time, whichever is given; None if neither is."""
        if sequence is not None:
            return cls(DeliverPolicy.BY_START_SEQUENCE, sequence=sequence)
        return None if time is None else cls(DeliverPolicy.BY_START_TIME, time=time)
