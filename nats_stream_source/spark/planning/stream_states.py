"""The streams of a query of several, and their states, with few requests.

Two ways lead to the states: one list of all streams of the account, with a request for each 256 of
them (``jetstream.stream_list``), or a request for each stream of the query. A poll takes the one
with fewer requests. A query with a pattern needs the list in any case, to find new matches: at the
first poll, and then every ``discoveryInterval``.

A stream that a list lacks is requested by itself: only the response that it does not exist proves
that. A query of listed names does not need the permission for ``STREAM.LIST``; without it, each
stream is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.errors import PermissionDeniedError, StreamNotFoundError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_list import PAGE, StreamList
from nats_stream_source.logs import field_logger
from nats_stream_source.spark.formats.base import FormatAdapter

log = field_logger(__name__)


class StreamStates:
    """Requests the states of the streams that ``adapter.stream_set`` selects.

    Args:
        clock: the time in seconds.

    Attributes:
        requests: the number of requests of the last poll.
    """

    def __init__(
        self, adapter: FormatAdapter, connection: ReusableConnection, clock: Callable[[], float]
    ) -> None:
        assert adapter.stream_set is not None
        self._adapter = adapter
        self._set = adapter.stream_set
        self._connection = connection
        self._clock = clock
        self._list = StreamList()
        self._may_list = True
        self._listed_at: float | None = None
        self._reported: set[str] = set()
        self._selected: dict[str, bool] = {}  # a pattern takes longer than a look-up
        self.requests = 1

    async def poll(self, known: Iterable[str]) -> dict[str, StreamInfo]:
        """The present streams of the query by name, each as its leader reports it.

        Args:
            known: the streams of an offset. Those of the last list are requested too.

        Raises:
            PermissionDeniedError: the query has a pattern, and ``STREAM.LIST`` is not permitted.
        """
        jetstream = await self._connection.jetstream()
        names = {self._adapter.stream_of(name) for name in self._set.names}
        names.update(name for name in known if self._selects(name))
        names.update(name for name, selected in self._selected.items() if selected)
        if not self._lists(len(names)):
            return await self._request_each(jetstream, names)
        try:
            listed = await self._list.request(jetstream)
        except PermissionDeniedError as error:
            if self._set.pattern is not None:
                raise
            log.info("each stream is requested by itself", streams=len(names), error=error)
            self._may_list = False
            return await self._request_each(jetstream, names)
        self._listed_at = self._clock()
        self._selected = {name: self._selects(name) for name in listed}
        found = {name: info for name, info in listed.items() if self._selected[name]}
        missing = await self._request_each(jetstream, names - found.keys())
        self.requests = self._list.requests + len(names - found.keys())
        return dict(sorted((found | missing).items()))

    async def check_listed(
        self, infos: Mapping[str, StreamInfo], *, must_exist: bool = True
    ) -> None:
        """Report listed names that do not exist, and once in the log, that there is no stream.

        Args:
            infos: the streams that :meth:`poll` returned.
            must_exist: whether a missing name is an error; else a warning, once.

        Raises:
            BucketNotFoundError, StreamNotFoundError: a listed name does not exist.
        """
        for name in self._set.names:
            stream = self._adapter.stream_of(name)
            if stream in infos:
                continue
            if not must_exist:
                self._warn_once("stream does not exist, the query waits for it", stream=stream)
                continue
            try:
                await self._adapter.stream_info(await self._connection.jetstream(), stream)
            except StreamNotFoundError as error:
                raise type(error)(f"could not read {self._set}: {error}") from error
        if self._set.pattern is not None and not infos:
            self._warn_once("no name matches the pattern", option=str(self._set))

    def report_not_selected(self, stream: str) -> None:
        """Log, once, that an offset has a stream that the options do not select."""
        self._warn_once("stream is not read any more", stream=stream, option=str(self._set))

    def _warn_once(self, text: str, **fields: str) -> None:
        about = f"{text} {fields}"
        if about not in self._reported:
            self._reported.add(about)
            log.warning(text, **fields)  # type: ignore[arg-type]

    def _selects(self, stream: str) -> bool:
        selected = self._selected.get(stream)
        return self._adapter.selects(stream) if selected is None else selected

    def _lists(self, streams: int) -> bool:
        """Whether the next poll lists all streams of the account."""
        if not self._may_list:
            return False
        if self._set.pattern is not None and (
            self._listed_at is None
            or self._clock() - self._listed_at >= self._set.discovery_interval
        ):
            return True
        # An account has at least the streams of the query.
        pages = -(-streams // PAGE) if self._listed_at is None else self._list.requests
        return pages < streams

    async def _request_each(
        self, jetstream: JetStream, names: Iterable[str]
    ) -> dict[str, StreamInfo]:
        async def request(name: str) -> StreamInfo | None:
            try:
                return await self._adapter.stream_info(jetstream, name)
            except StreamNotFoundError:
                return None

        ordered = sorted(names)
        infos = await gather_limited(request, ordered)
        self.requests = max(1, len(ordered))
        return {name: info for name, info in zip(ordered, infos, strict=True) if info is not None}
