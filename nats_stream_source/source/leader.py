"""What the leader of a query's stream says, and what of the stream the query reads by that."""

from __future__ import annotations

from nats_stream_source.errors import MinLastSequenceError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.read_after_write import reached
from nats_stream_source.source.query import Content, Query


class Leader:
    """Asks the leader of one query's stream, which is looked up once.

    Attributes:
        info: its last answer.
        content: what the query reads, by that.
    """

    info: StreamInfo
    content: Content

    def __init__(self, query: Query, link: Link) -> None:
        self._query = query
        self._link = link
        self._stream: str | None = None
        self._config: dict[str, object] | None = None

    async def jetstream(self) -> JetStream:
        """JetStream over the query's connection."""
        return await self._link.jetstream()

    async def look(self) -> StreamInfo:
        """The stream now.

        Raises:
            UnsupportedStreamError, ConfigurationError, StreamNotFoundError, …: as :class:`Query`.
        """
        jetstream = await self.jetstream()
        if self._stream is None:
            self._stream = await self._query.stream(jetstream)
        info = await self._query.look(jetstream, self._stream)
        if info.config != self._config:
            self.content = self._query.content(info)
            self._config = info.config
        self.info = info
        return info

    async def check(self) -> None:
        """As :meth:`Query.check`, of the last answer."""
        await self._query.check(await self.jetstream(), self.info)

    async def look_first(self) -> StreamInfo:
        """The stream once it has what the query must see (ADR-53, ``Query.min_last_seq``).

        Raises:
            MinLastSequenceError: it has not within ``requestTimeout``.
        """
        info = await self.look()
        if (least := self._query.min_last_seq) is not None and info.last_seq < least:
            try:
                await reached(await self.jetstream(), info.name, least)
            except MinLastSequenceError as error:
                option = f"minLast{self._query.words.sequence.capitalize()}"
                raise MinLastSequenceError(
                    f"{error}. The option {option!r} is for a query's first start: one that has a "
                    f"checkpoint needs it no more, and must not have it once the stream was made "
                    f"anew or set back"
                ) from None
            info = await self.look()
        return info

    async def confirm(self, through: int) -> None:
        """Make sure that what was just not found up to ``through`` is not there.

        Raises:
            RequestTimeoutError: another server leads the stream than before, or has less by now.
        """
        if self.info.replicated:
            now = await self._query.look(await self.jetstream(), self.info.name)
            self.info.check_leads_on(now, through)
