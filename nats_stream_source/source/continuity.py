"""Is the stream still the one that the offset was taken from, and is everything still there?

Three things can be wrong, and each is data loss to the query:

- *made anew*: the stream has another creation time (``created``).
- *set back*: it ends before the offset (a server that lost power before its fsync, a restored
  backup), or it has grown past it again and has another message at ``stream_seq``: its time is not
  the offset's. This cannot be seen where that very message was superseded meanwhile.
- *aged out*: the stream begins after the offset, so that entries went away unread. Current values
  of a bucket are exempt, since compaction is their nature; ``includeHistory`` asks for all.

With ``failOnDataLoss`` (the default) each is an error. Without, it is a warning, and the query goes
on without repeating a row: in a new epoch, from the beginning of the new stream, or from the first
message that is later than all it has read; or simply with what is left.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from nats_stream_source.errors import DataLossError
from nats_stream_source.jetstream.api import JetStream, StreamInfo, nanoseconds
from nats_stream_source.jetstream.link import Link
from nats_stream_source.options import KvOptions
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.ranges import answered, first_after

log = logging.getLogger(__name__)


async def time_at(jetstream: JetStream, info: StreamInfo, seq: int) -> str | None:
    """The time of the message at ``seq``; None when it is gone and was not the last one."""
    if seq == info.last_seq:
        return info.last_time
    message = await jetstream.message(info.name, seq=seq) if seq else None
    return message.time if message else None


class Continuity:
    """Compares offsets with the stream as its leader has it now."""

    def __init__(self, options: KvOptions, link: Link) -> None:
        self._options = options
        self._link = link

    async def _jetstream(self) -> JetStream:
        return JetStream(await self._link.connection())

    async def go_on(self, start: Offset, info: StreamInfo) -> Offset:
        """Where reading goes on from ``start``: ``start`` itself, or a new epoch after a loss."""
        if info.created != start.created:
            self._lost(
                f"stream {info.name} was deleted and made again (created {info.created}, the "
                f"checkpoint has {start.created}): what came after revision {start.stream_seq} "
                f"and was not read is gone",
                "read the new stream from its beginning",
            )
            return _new_epoch(start, info.created, 0)
        if await self._set_back(start, info):
            at = await self._first_later(start, info)
            self._lost(
                f"stream {info.name} was set back: it now ends at {info.last_seq}, or has another "
                f"message at {start.stream_seq}, which the query had read",
                f"go on after revision {at}",
            )
            return _new_epoch(
                start, info.created, at, await time_at(await self._jetstream(), info, at)
            )
        # Where the query has not begun, history goes as far back as it does.
        begun = start.stream_seq > start.origin or self._options.start_sequence is not None
        if self._options.include_history and begun and info.first_seq > start.stream_seq + 1:
            self.aged_out(info, start.stream_seq + 1)
        return start

    def aged_out(self, info: StreamInfo, expected: int) -> None:
        """Report that the stream begins later than at ``expected``, from where all was wanted."""
        what = (
            f"stream {info.name} begins at {info.first_seq} by now: revisions {expected} to "
            f"{info.first_seq - 1} went away before they were read (option 'includeHistory' asks "
            f"for all of them; a deeper history keeps them)"
        )
        if self._options.keys:
            # Which keys they were of, nobody knows any more: perhaps none of the query's.
            log.warning("%s, if there were any of keys=%s", what, ",".join(self._options.keys))
            return
        self._lost(what, f"go on with revision {info.first_seq}")

    async def readable_through(self, end: Offset, info: StreamInfo) -> int:
        """Up to which sequence a range that an earlier process planned can still be read."""
        if info.created != end.created:
            self._lost(
                f"stream {info.name} was deleted and made again: the micro-batch up to revision "
                f"{end.stream_seq}, which was planned but not finished, is gone",
                "leave that micro-batch empty",
            )
            return 0
        if not await self._set_back(end, info):
            return end.stream_seq
        at = await self._first_later(end, info)
        self._lost(
            f"stream {info.name} was set back: of the micro-batch up to revision "
            f"{end.stream_seq}, which was planned but not finished, what came after {at} is gone",
            f"read it up to revision {at}",
        )
        return min(at, end.stream_seq)

    async def _set_back(self, offset: Offset, info: StreamInfo) -> bool:
        if offset.time is None and offset.stream_seq == offset.origin:
            return False  # a start that was chosen beyond the end waits
        if info.last_seq < offset.stream_seq:
            return True
        if info.last_seq == offset.stream_seq and info.last_time == offset.time:
            return False
        # The stream info alone proves nothing: a server that was killed after the last message was
        # deleted has no time for it any more. And where the offset has no time, there was no
        # message; the server gives no sequence out twice.
        message = await (await self._jetstream()).message(info.name, seq=offset.stream_seq)
        return message is not None and message.time != offset.time

    async def _first_later(self, start: Offset, info: StreamInfo) -> int:
        """The sequence before the first message that is later than ``start.time``."""
        if start.time is None:
            return min(start.stream_seq, info.last_seq)  # unknown: at least nothing comes twice
        jetstream = await self._jetstream()
        read_until = nanoseconds(start.time)

        async def later(seq: int) -> bool:
            message = await jetstream.message(info.name, seq=seq, next_by_subj=">")
            return message is None or nanoseconds(message.time) > read_until

        return max(0, await answered(first_after(info.first_seq, info.last_seq), later) - 1)

    def _lost(self, what: str, instead: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLossError(
                f"{what}. Set the option failOnDataLoss=false to {instead}, or use another "
                f"checkpoint location to begin anew"
            )
        log.warning("%s; failOnDataLoss=false: %s", what, instead)


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
