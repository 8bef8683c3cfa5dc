"""Is the stream still the one that the offset was taken from, and is everything still there?

Three things can be wrong, and each is data loss to the query:

- *made anew*: the stream has another creation time (``created``).
- *set back*: it ends before the offset (a server that lost power before its fsync, a restored
  backup), or it has grown past it again and has another message at ``stream_seq``: its time is not
  the offset's. This cannot be seen where that very message was superseded meanwhile.
- *aged out*: the stream begins after the offset, so that entries went away unread. Current values
  are exempt, since compaction is their nature (``Query.complete``).

With ``failOnDataLoss`` (the default) each is an error. Without, it is a warning, and the query goes
on without repeating a row: in a new epoch, from the beginning of the new stream, or from the first
message that is later than all it has read; or simply with what is left.
"""

from __future__ import annotations

from dataclasses import replace

from nats_stream_source.errors import DataLossError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.less import check_less
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.range_request import ENDLESS
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.logs import field_logger
from nats_stream_source.options import DeliverPolicy
from nats_stream_source.source.beginning import before_time
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.query import Query

log = field_logger(__name__)


async def time_at(jetstream: JetStream, info: StreamInfo, seq: int) -> str | None:
    """The time of the message at ``seq``; None when it is gone and was not the last one."""
    if seq == info.last_seq:
        return info.last_time
    message = await jetstream.message(info.name, seq=seq) if seq else None
    return message.time if message else None


async def was_set_back(jetstream: JetStream, info: StreamInfo, seq: int, time: str | None) -> bool:
    """Whether a stream that had a message of ``time`` at ``seq`` was set back since.

    Args:
        info: the stream as its leader has it now.
        time: None where there was no message.
    """
    if info.last_seq < seq:
        await check_less(jetstream, info, seq)
        return True
    if info.last_seq == seq and info.last_time == time:
        return False
    # The stream info alone proves nothing: a server that was killed after the last message was
    # deleted has no time for it any more. And where there was no time, there was no message; the
    # server gives no sequence out twice.
    message = await jetstream.message(info.name, seq=seq)
    return message is not None and message.time != time


class Continuity:
    """Compares offsets with the stream as its leader has it now."""

    def __init__(self, query: Query, link: Link) -> None:
        self._query = query
        self._link = link

    async def go_on(self, start: Offset, info: StreamInfo) -> Offset:
        """Where reading goes on from ``start``: ``start`` itself, or a new epoch after a loss."""
        if info.created != start.created:
            self._lost(
                info.name,
                f"stream {info.name} was deleted and made again (created {info.created}, the "
                f"checkpoint has {start.created}): what came after {self._query.words.sequence} "
                f"{start.stream_seq} "
                f"and was not read is gone",
                "read the new stream from its beginning",
            )
            return _new_epoch(start, info.created, max(0, info.first_seq - 1))
        if await self._set_back(start, info):
            at = await self._first_later(start, info)
            self._lost(
                info.name,
                f"stream {info.name} was set back: it now ends at {info.last_seq}, or has another "
                f"message at {start.stream_seq}, which the query had read",
                f"go on after {self._query.words.sequence} {at}",
            )
            return _new_epoch(
                start, info.created, at, await time_at(await self._link.jetstream(), info, at)
            )
        self.still_has(info, start.stream_seq, start)
        return start

    def still_has(self, info: StreamInfo, start: int, offset: Offset, end: int = ENDLESS) -> None:
        """Report what is gone of ``(start, end]``, where all of it is wanted.

        Args:
            offset: whose epoch the range is of.
        """
        due = max(start, self.history_through(start, offset))
        last = min(info.first_seq - 1, end)
        if last > due and self._query.complete(self._query.content(info)):
            self.aged_out(info, due + 1, last)

    def history_through(self, start: int, offset: Offset) -> int:
        """Up to where nothing is due yet to a reader that goes on after ``start``.

        Where the query has not read yet, history goes as far back as it does; not so what came
        since the query began, nor a sequence that the user named.
        """
        chosen = self._query.beginning.policy is DeliverPolicy.BY_START_SEQUENCE
        return 0 if chosen or start > offset.origin else offset.initial_through

    def aged_out(
        self,
        info: StreamInfo,
        first: int,
        last: int,
        count: int | None = None,
        filters: tuple[str, ...] | None = None,
    ) -> None:
        """Report that of ``first`` to ``last``, of which all was wanted, something is gone.

        Args:
            count: how many are gone; all if None.
            filters: the filter subjects of the read; None for those of the query's options, of
                which the filters of a DataFrame may leave a part only.
        """
        words = self._query.words
        some = "" if count in (None, last - first + 1) else f"{count} of "
        what = (
            f"stream {info.name} begins at {info.first_seq} by now: {some}{words.sequence}s "
            f"{first} to {last} went away before they were read ({words.keeps})"
        )
        content = self._query.content(info)
        names = self._query.filter if content.counted else ()
        if filters is not None and filters != content.filters:
            names = tuple(one.removeprefix(content.prefix) for one in filters)
        if names:
            # Which subjects they were of, nobody knows any more: perhaps none of the query's.
            log.warning(
                f"{what}, if there were any of {words.filters}={','.join(names)}", stream=info.name
            )
            return
        self._lost(info.name, what, f"go on with {words.sequence} {info.first_seq}")

    async def readable_through(self, end: Offset, info: StreamInfo) -> Offset:
        """``end`` of a range that an earlier process planned, or up to where it can be read.

        Where that is not ``end`` itself, there is no time: other messages are there by now.
        """
        if info.created != end.created:
            self._lost(
                info.name,
                f"stream {info.name} was deleted and made again: the micro-batch up to "
                f"{self._query.words.sequence} {end.stream_seq}, which was planned but not "
                f"finished, is gone",
                "leave that micro-batch empty",
            )
            return replace(end, stream_seq=0, time=None)
        if not await self._set_back(end, info):
            return end
        at = await self._first_later(end, info)
        self._lost(
            info.name,
            f"stream {info.name} was set back: of the micro-batch up to "
            f"{self._query.words.sequence} {end.stream_seq}, which was planned but not finished, "
            f"what came after {at} is gone",
            f"read it up to {self._query.words.sequence} {at}",
        )
        return replace(end, stream_seq=min(at, end.stream_seq), time=None)

    async def _set_back(self, offset: Offset, info: StreamInfo) -> bool:
        if offset.time is None and offset.stream_seq == offset.origin:
            return False  # a start that was chosen beyond the end waits
        jetstream = await self._link.jetstream()
        return await was_set_back(jetstream, info, offset.stream_seq, offset.time)

    async def _first_later(self, start: Offset, info: StreamInfo) -> int:
        """The sequence before the first message that is later than ``start.time``."""
        if start.time is None:
            return min(start.stream_seq, info.last_seq)  # unknown: at least nothing comes twice
        return await before_time(await self._link.jetstream(), info, nanoseconds(start.time) + 1)

    def _lost(self, stream: str, what: str, instead: str) -> None:
        if self._query.reading.fail_on_data_loss:
            raise DataLossError(
                f"{what}. Set the option failOnDataLoss=false to {instead}; a streaming "
                f"query can begin anew with another checkpoint location"
            )
        log.warning(f"data loss accepted: {what}; failOnDataLoss=false: {instead}", stream=stream)


def _new_epoch(start: Offset, created: str, origin: int, time: str | None = None) -> Offset:
    return replace(
        start,
        created=created,
        epoch=start.epoch + 1,
        origin=origin,
        stream_seq=origin,
        time=time,
        initial_through=origin,
    )
