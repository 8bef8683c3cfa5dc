"""Reads the messages of a split's range with an ordered consumer.

The stream leader serves the consumer. A replica whose store was damaged (a flipped bit, a lost
block) drops unreadable messages: its last sequence is the leader's, it counts as current, it is not
repaired, and its consumers skip its missing messages like deleted ones. A lagging replica, or one
whose clock expires messages earlier, differs from the leader for a while. Only the leader's
messages are those of the stream.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.spark.formats.base import FormatAdapter
from nats_stream_source.spark.formats.splits import Split
from nats_stream_source.spark.runner import Runner
from nats_stream_source.wire.framing.frames import Frames


def read_range(
    runner: Runner, split: Split, adapter: FormatAdapter, *, headers_only: bool | None = None
) -> Generator[Frames, None, None]:
    """Yield the messages of the range.

    Args:
        headers_only: read without payloads; None for the query's own setting.
    """
    request = range_request(split, adapter)
    if headers_only is not None:
        request = replace(request, headers_only=headers_only)
    return runner.iterate(OrderedReader(runner.connection, request).batches())


def range_request(split: Split, adapter: FormatAdapter) -> RangeRequest:
    """The request of an ordered consumer for a split."""
    return RangeRequest(
        stream=split.stream,
        created=split.created,
        start=split.start,
        end=split.end,
        filters=split.filters,
        last_per_subject=split.last_per_subject,
        headers_only=adapter.headers_only,
        at_leader=True,
    )
