"""The stream of a query as its leader reports it, and the read scope that follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.errors import ConfigurationError, MinLastSequenceError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.leader import wait_for_last_seq
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.spark.formats.base import FormatAdapter, ReadScope


class Leader:
    """Requests from the leader of one stream of a query.

    Args:
        stream: the stream's name; None to look it up once, as the adapter says.

    Attributes:
        info: the last response.
        scope: the messages that the query reads, by that response.
    """

    info: StreamInfo
    scope: ReadScope

    def __init__(
        self, adapter: FormatAdapter, connection: ReusableConnection, stream: str | None = None
    ) -> None:
        self._adapter = adapter
        self._connection = connection
        self._stream = stream
        self._config: dict[str, object] | None = None

    async def jetstream(self) -> JetStream:
        """JetStream over the query's connection."""
        return await self._connection.jetstream()

    async def stream_info(self) -> StreamInfo:
        """Request the stream's present state.

        Raises:
            UnsupportedStreamError, ConfigurationError, StreamNotFoundError, …: as
            :class:`FormatAdapter`.
        """
        jetstream = await self.jetstream()
        if self._stream is None:
            self._stream = await self._adapter.stream_name(jetstream)
        return self.accept(await self._adapter.stream_info(jetstream, self._stream))

    def accept(self, info: StreamInfo) -> StreamInfo:
        """Take a response to another request, such as a list of streams, as the present state.

        Raises:
            UnsupportedStreamError, ConfigurationError: as :class:`FormatAdapter`.
        """
        if info.config != self._config:
            self.scope = self._adapter.read_scope(info)
            self._config = info.config
        self.info = info
        return info

    async def validate_filters(self) -> None:
        """:meth:`FormatAdapter.validate_filters` for the last response."""
        await self._adapter.validate_filters(await self.jetstream(), self.info)

    async def initial_stream_info(self) -> StreamInfo:
        """Request the state once the stream has the query's ``min_last_seq`` (ADR-53).

        Raises:
            MinLastSequenceError: the stream did not reach it within ``requestTimeout``.
        """
        info = await self.stream_info()
        if (min_last_seq := self._adapter.min_last_seq) and info.last_seq < min_last_seq:
            try:
                await wait_for_last_seq(await self.jetstream(), info.name, min_last_seq)
            except MinLastSequenceError as error:
                raise MinLastSequenceError(
                    f"{error}; the option {self._adapter.terms.min_last_option!r} is for the first "
                    f"start of a query: remove it for a query that has a checkpoint, or whose "
                    f"stream was re-created or rolled back"
                ) from None
            info = await self.stream_info()
        return info

    async def confirm_missing(self, through: int) -> None:
        """Verify that messages up to ``through`` that were not found do not exist.

        Raises:
            RequestTimeoutError: the stream leader changed, or reports a lower last sequence.
        """
        if self.info.replicated:
            now = await self._adapter.stream_info(await self.jetstream(), self.info.name)
            self.info.check_same_leader(now, through)


MAX_STREAMS = 32
"""Streams for which requests run at a time, in a query of several."""


async def validate_filters(leaders: Sequence[Leader]) -> None:
    """Verify that a query of several streams can have a row.

    Raises:
        ConfigurationError: no stream has or accepts a message that a filter matches.
    """
    refused: list[ConfigurationError] = []

    async def validate(leader: Leader) -> None:
        try:
            await leader.validate_filters()
        except ConfigurationError as error:
            refused.append(error)

    await gather_limited(validate, leaders, MAX_STREAMS)
    if leaders and len(refused) == len(leaders):
        raise refused[0]
