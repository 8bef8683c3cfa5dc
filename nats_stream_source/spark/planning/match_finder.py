"""Detects new messages that match a query's filters, with few requests per poll.

New messages lie in ``(start, last]``. The newest message alone often decides. Otherwise the leader
is requested for each filter's next message after ``start``: for all filters at the first poll from
a ``start``; later, while other subjects receive messages, with at most eight requests per poll: the
next eight filters, or the new messages themselves where those are fewer. No match is missed, it is
only found some polls later, and any sequence that the leader has can end a range. While the stream
does not change, a match beyond the start of the next range is not requested again.

After a restore or a roll-back other messages have the sequences that were requested. So results of
earlier polls are used only while the stream still has the message that was its last one then: one
more request per poll, with more than eight filters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nats_stream_source.errors import RequestTimeoutError
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.stream_identity import Identity, KnownStream, identify
from nats_stream_source.jetstream.subjects import overlap
from nats_stream_source.rows.stream_view import StreamView

_MAX_REQUESTS = 8  # per poll, after the first poll has requested all filters
_MAX_PARALLEL = 64


class MatchFinder:
    """Finds matching messages of one stream for one query."""

    def __init__(self) -> None:
        self._start = -1
        self._unmatched_through: dict[str, int] = {}  # by filter: no match in (start, …]
        self._known = KnownStream("", 0)  # the stream at the last poll that requested filters
        self._found: tuple[tuple[object, ...], tuple[int, str | None]] | None = None

    def is_exhausted(self, last: int) -> bool:
        """Whether every filter was requested, and none matches a message up to ``last``."""
        return min(self._unmatched_through.values(), default=last) >= last

    async def find_newest(
        self, view: StreamView, start: int, last: int, *, thorough: bool = False
    ) -> tuple[int, str | None] | None:
        """A matching message in ``(start, last]``, the last one if possible; None if not found.

        The result is its sequence and timestamp, or ``last`` without a timestamp where a filter's
        last message lies beyond ``last``.

        Args:
            thorough: request all filters, so that None means that none matches.

        Raises:
            RequestTimeoutError: no match was found, and the responding server may not be the
                stream leader any more.
        """
        state = (view.info.position, view.scope.effective_filters, last)
        if self._found is not None and self._found[0] == state and self._found[1][0] > start:
            return self._found[1]
        newest = await self._find_newest(view, start, last, thorough)
        if newest is not None:
            self._found = state, newest
        else:
            try:
                await view.verify_missing(last)
            except RequestTimeoutError:
                self._start = -1  # discard: the results of a former leader prove nothing
                raise
        return newest

    async def _find_newest(
        self, view: StreamView, start: int, last: int, thorough: bool
    ) -> tuple[int, str | None] | None:
        jetstream, stream, filters = view.jetstream, view.info.name, view.scope.effective_filters
        at_end = await jetstream.message(stream, seq=last)
        if at_end is not None and _matches(at_end, filters):
            return last, at_end.time
        if (
            start != self._start
            or self._unmatched_through.keys() != set(filters)
            # Fewer filters are all requested by each poll.
            or (
                len(filters) > _MAX_REQUESTS
                and await identify(jetstream, view.info, self._known) is not Identity.SAME
            )
        ):
            self._start, self._unmatched_through = start, dict.fromkeys(filters, start)
            thorough = True
        self._known = KnownStream.of(view.info)
        if thorough and len(filters) > _MAX_REQUESTS:
            # One request per filter instead of two; with so many, none is wide and thus slow.
            hits = list(filters)
        else:
            hits = await self._matching_filters(jetstream, stream, last, thorough)
        newest = None
        for subject_filter, message in zip(
            hits, await _messages(jetstream, stream, hits, last=True), strict=True
        ):
            if message is None or message.seq <= start:
                self._unmatched_through[subject_filter] = last
            elif newest is None or message.seq > newest.seq:
                newest = message
        if newest is not None:
            return (newest.seq, newest.time) if newest.seq <= last else (last, None)
        return None

    async def _matching_filters(
        self, jetstream: JetStream, stream: str, last: int, thorough: bool
    ) -> list[str]:
        """Filters that match a message up to ``last``."""
        checked = min(self._unmatched_through.values())
        if not thorough and last - checked <= _MAX_REQUESTS < len(self._unmatched_through):
            new = await asyncio.gather(
                *(jetstream.message(stream, seq=seq) for seq in range(checked + 1, last))
            )
            hits = [
                subject_filter
                for subject_filter in self._unmatched_through
                for message in new
                if message is not None and _matches(message, (subject_filter,))
            ]
            if not hits:
                self._unmatched_through = dict.fromkeys(self._unmatched_through, last)
            return hits
        # The filters that were requested least recently come first.
        turn = sorted(self._unmatched_through, key=self._unmatched_through.__getitem__)
        turn = turn if thorough else turn[:_MAX_REQUESTS]
        upcoming = await _messages(jetstream, stream, turn, seq=self._start + 1)
        hits = []
        for subject_filter, message in zip(turn, upcoming, strict=True):
            if message is not None and message.seq <= last:
                hits.append(subject_filter)
            else:
                self._unmatched_through[subject_filter] = last
        return hits


def should_advance(position: int, first_seq: int, last_seq: int) -> bool:
    """Whether a query without matching rows should advance its offset to ``last_seq``.

    Without this, retention would pass the offset of a query whose filter rarely matches, and the
    query would report a data loss although it lost no message. Advancing costs an empty
    micro-batch, so it waits until the position lies in the older half of the stream.
    """
    return position < last_seq and position - first_seq < last_seq - position


def _matches(message: StoredMessage, filters: Sequence[str]) -> bool:
    return any(overlap(message.subject, subject_filter) for subject_filter in filters)


async def _messages(
    jetstream: JetStream,
    stream: str,
    filters: Sequence[str],
    *,
    seq: int | None = None,
    last: bool = False,
) -> list[StoredMessage | None]:
    """Each filter's next message from ``seq`` on, or its last one, as the leader has it."""
    messages: list[StoredMessage | None] = []
    for index in range(0, len(filters), _MAX_PARALLEL):
        some = filters[index : index + _MAX_PARALLEL]
        messages += await asyncio.gather(
            *(
                jetstream.message(stream, last_by_subj=subject_filter)
                if last
                else jetstream.message(stream, seq=seq, next_by_subj=subject_filter)
                for subject_filter in some
            )
        )
    return messages
