"""The start position of a query, in terms of the deliver policies of JetStream consumers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum


class DeliverPolicy(str, Enum):
    """JetStream's deliver policies; the value is the name in the protocol."""

    ALL = "all"
    NEW = "new"
    LAST = "last"
    LAST_PER_SUBJECT = "last_per_subject"
    BY_START_SEQUENCE = "by_start_sequence"
    BY_START_TIME = "by_start_time"


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

    def with_time_strategy(self, strategy: StartTimeStrategy | None) -> StartPosition:
        """The same position, and those that it names, with a strategy."""
        if strategy is None:
            return self
        named = self.by_name and {
            name: start.with_time_strategy(strategy) for name, start in self.by_name.items()
        }
        return replace(self, by_name=named, time_strategy=strategy)

    def of(self, name: str) -> StartPosition:
        """The position of a bucket or stream; that of its first message if it is not named."""
        return self if self.by_name is None else self.by_name.get(name, StartPosition())


START_WORDS = {
    "earliest": StartPosition(DeliverPolicy.ALL),
    "latest": StartPosition(DeliverPolicy.NEW),
}
"""The words of Spark's Kafka source for a start that is not a sequence or a time."""
