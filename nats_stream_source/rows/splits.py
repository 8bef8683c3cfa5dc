"""Splits: the ranges that the planner passes to the readers.

Pure, since each task's process unpickles them.

A micro-batch consists of :class:`Split` objects, a batch of :class:`BatchSplit` objects, each with
the kind of read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.stream_info import StreamInfo


@dataclass(frozen=True, slots=True)
class Split:
    """A range of a stream that one task reads, and the labels of its rows.

    Attributes:
        range: the request of the ordered consumer that reads it.
        prefix: the part of every subject before the key.
        initial_through: rows up to this sequence are initial values.
        required_from: the first sequence of the range that the stream had when it was planned, if
            every message is required: messages that age out before they are read are a data loss.
            None if compaction may remove messages.
        expiry_allowed_through: at the start of a query, messages up to this sequence may age out
            before the first row is read without being a data loss.
    """

    range: RangeRequest
    prefix: str
    initial_through: int
    required_from: int | None = None
    expiry_allowed_through: int = 0

    def __str__(self) -> str:
        return str(self.range)


class BatchReadKind(Enum):
    """The messages of its range that a task of a batch reads.

    ``RANGE``: every message. ``CURRENT``: the last message of each subject, at least as new as the
    end of the range (``reading.latest_values``). ``AS_OF``: the last message of each subject
    at the end of the range (``reading.as_of``).
    """

    RANGE = "range"
    CURRENT = "current"
    AS_OF = "as of"


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """A split of a batch.

    Attributes:
        planned: the stream when the split was planned.
        history: the maximum number of messages per subject; -1 for no limit.
        subject_count: the number of subjects that the stream had; None where the query reads some
            of them only.
    """

    split: Split
    kind: BatchReadKind
    planned: StreamInfo
    history: int
    subject_count: int | None

    def __str__(self) -> str:
        return f"{self.split} {self.kind.value}"


MESSAGE_TTLS = "allow_msg_ttl"
"""The setting of a stream that allows a TTL on each message."""


def removal_settings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings of a stream that remove messages, other than the limit per subject."""
    settings = ["max_age"] if (config.get("max_age") or 0) > 0 else []
    if config.get("discard", "old") == "old":
        settings += [name for name in ("max_bytes", "max_msgs") if (config.get(name) or -1) > 0]
    if config.get("allow_msg_ttl"):
        settings.append(MESSAGE_TTLS)
    return tuple(settings)
