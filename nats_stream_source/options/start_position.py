"""The start position of a query, in terms of the deliver policies of JetStream consumers."""

from __future__ import annotations

from collections.abc import Mapping
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


START_WORDS = {"earliest": DeliverPolicy.ALL, "latest": DeliverPolicy.NEW}
"""The words of Spark's Kafka source for a start that is not a sequence or a time."""

NamedStarts = Mapping[str, int | DeliverPolicy]
"""A sequence, a time in nanoseconds or a policy for each bucket or stream, by name."""


class StartTimeStrategy(str, Enum):
    """What happens if all messages of a stream are older than the start time."""

    ERROR = "error"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class StartPosition:
    """The start position of a query without a checkpoint.

    Attributes:
        sequence: the first stream sequence, with ``by_start_sequence``.
        time: nanoseconds since 1970, with ``by_start_time``: the query starts with the first
            message at or after this time.
        by_name: the positions of buckets or streams, by the names of the user; None if all have
            this one.
        time_strategy: None to start with the next message, and to refuse a time in the future.
    """

    policy: DeliverPolicy = DeliverPolicy.ALL
    sequence: int | None = None
    time: int | None = None
    by_name: Mapping[str, StartPosition] | None = None
    time_strategy: StartTimeStrategy | None = None

    @classmethod
    def at(
        cls,
        sequence: int | NamedStarts | None,
        time: int | NamedStarts | None,
        time_strategy: StartTimeStrategy | None = None,
    ) -> StartPosition | None:
        """The position at a sequence or at a time; None if neither is given."""
        if sequence is not None:
            return cls._given(DeliverPolicy.BY_START_SEQUENCE, sequence, None)
        if time is not None:
            return cls._given(DeliverPolicy.BY_START_TIME, time, time_strategy)
        return None

    @classmethod
    def _given(
        cls,
        policy: DeliverPolicy,
        start: int | DeliverPolicy | NamedStarts,
        time_strategy: StartTimeStrategy | None,
    ) -> StartPosition:
        if isinstance(start, DeliverPolicy):
            return cls(start)
        if isinstance(start, Mapping):
            named = {name: cls._given(policy, one, time_strategy) for name, one in start.items()}
            return cls(policy, by_name=named)
        if policy is DeliverPolicy.BY_START_SEQUENCE:
            return cls(policy, sequence=start)
        return cls(policy, time=start, time_strategy=time_strategy)

    def of(self, name: str) -> StartPosition:
        """The position of a bucket or stream; that of its first message if it is not named."""
        return self if self.by_name is None else self.by_name.get(name, StartPosition())
