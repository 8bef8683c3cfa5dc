"""Whether anything new matches a query's filters, with few requests a look.

What is new lies in ``(start, last]``. The newest message alone often answers. Otherwise the leader
is asked for each filter's next message from ``start`` on: all of them at the first look from a
``start``, later, while others write what does not match, at most eight a look: the next eight
filters, or the new messages themselves where those are fewer. So nothing is missed, only found some
looks later, and any sequence that the leader has will do as the end of a range.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nats_stream_source.errors import RequestTimeoutError
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.subjects import overlap
from nats_stream_source.source.leader import Leader

_MOST = 8  # requests of a look, once all filters were asked
_AT_ONCE = 64


class Matches:
    """Looks for matching messages for one query."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._start = -1
        self._clear: dict[str, int] = {}  # by filter: nothing matches in (start, …]

    def settled(self, last: int) -> bool:
        """Whether all filters were asked, and nothing up to ``last`` matches."""
        return min(self._clear.values(), default=last) >= last

    async def newest(
        self, filters: Sequence[str], start: int, last: int, *, thorough: bool = False
    ) -> tuple[int, str | None] | None:
        """A matching message in ``(start, last]``, the last one where possible; None: none found.

        Its sequence and time. When a filter's last message lies beyond ``last``, the answer is
        ``last`` itself, without a time.

        Args:
            thorough: ask for all filters, so that None means that there is none.

        Raises:
            RequestTimeoutError: nothing was found, and that may have been said by a server that
                does not lead the stream any more.
        """
        found = await self._newest(filters, start, last, thorough)
        if found is None:
            try:
                await self._leader.confirm(last)
            except RequestTimeoutError:
                self._start = -1  # what it did not find proves nothing
                raise
        return found

    async def _newest(
        self, filters: Sequence[str], start: int, last: int, thorough: bool
    ) -> tuple[int, str | None] | None:
        jetstream, stream = await self._leader.jetstream(), self._leader.info.name
        newest = await jetstream.message(stream, seq=last)
        if newest is not None and _matches(newest, filters):
            return last, newest.time
        if start != self._start or self._clear.keys() != set(filters):
            self._start, self._clear = start, dict.fromkeys(filters, start)
            thorough = True
        if thorough and len(filters) > _MOST:
            # One question a filter in place of two; none of so many is wide, which would be slow.
            hits = list(filters)
        else:
            hits = await self._hits(jetstream, stream, last, thorough)
        found = None
        for one, message in zip(
            hits, await _asked(jetstream, stream, hits, last=True), strict=True
        ):
            if message is None or message.seq <= start:
                self._clear[one] = last
            elif found is None or message.seq > found.seq:
                found = message
        if found is not None:
            return (found.seq, found.time) if found.seq <= last else (last, None)
        return None

    async def _hits(
        self, jetstream: JetStream, stream: str, last: int, thorough: bool
    ) -> list[str]:
        """Filters that match something up to ``last``."""
        seen = min(self._clear.values())
        if not thorough and last - seen <= _MOST < len(self._clear):
            new = await asyncio.gather(
                *(jetstream.message(stream, seq=seq) for seq in range(seen + 1, last))
            )
            hits = [
                one for one in self._clear for m in new if m is not None and _matches(m, (one,))
            ]
            if not hits:
                self._clear = dict.fromkeys(self._clear, last)
            return hits
        # Those that were not asked for longest come first.
        turn = sorted(self._clear, key=self._clear.__getitem__)
        turn = turn if thorough else turn[:_MOST]
        upcoming = await _asked(jetstream, stream, turn, seq=self._start + 1)
        hits = []
        for one, message in zip(turn, upcoming, strict=True):
            if message is not None and message.seq <= last:
                hits.append(one)
            else:
                self._clear[one] = last
        return hits


def _matches(message: StoredMessage, filters: Sequence[str]) -> bool:
    return any(overlap(message.subject, one) for one in filters)


async def _asked(
    jetstream: JetStream,
    stream: str,
    filters: Sequence[str],
    *,
    seq: int | None = None,
    last: bool = False,
) -> list[StoredMessage | None]:
    """Each filter's next message from ``seq`` on, or its last one, at the leader."""
    found: list[StoredMessage | None] = []
    for begin in range(0, len(filters), _AT_ONCE):
        some = filters[begin : begin + _AT_ONCE]
        found += await asyncio.gather(
            *(
                jetstream.message(stream, last_by_subj=one)
                if last
                else jetstream.message(stream, seq=seq, next_by_subj=one)
                for one in some
            )
        )
    return found
