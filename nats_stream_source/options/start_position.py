"""The start position of a query, in terms of the deliver policies of JetStream consumers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DeliverPolicy(str, Enum):
    """JetStream's deliver policies; the value is the name in the protocol."""

    ALL = "all"
    NEW = "new"
    LAST = "last"
    LAST_PER_SUBJECT = "last_per_subject"
    BY_START_SEQUENCE = "by_start_sequence"
    BY_START_TIME = "by_start_time"


@dataclass(frozen=True, slots=True)
class StartPosition:
    """The start position of a query without a checkpoint.

    Attributes:
        sequence: the first stream sequence, with ``by_start_sequence``.
        time: nanoseconds since 1970, with ``by_start_time``: the query starts with the first
            message at or after this time.
    """

    policy: DeliverPolicy = DeliverPolicy.ALL
    sequence: int | None = None
    time: int | None = None

    @classmethod
    def at(cls, sequence: int | None, time: int | None) -> StartPosition | None:
        """The position at a sequence or at a time; None if neither is given."""
        if sequence is not None:
            return cls(DeliverPolicy.BY_START_SEQUENCE, sequence=sequence)
        return None if time is None else cls(DeliverPolicy.BY_START_TIME, time=time)
