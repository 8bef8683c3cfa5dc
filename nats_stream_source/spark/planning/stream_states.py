"""The streams of a query, as their leaders report them, with few requests.

A query of one stream requests that stream. For a query of several, two ways lead to their states:
one list of all streams of the account, with a request for each 256 of them (``STREAM.LIST``), or a
request for each stream of the query. A poll takes the one with fewer requests. A query with a
pattern needs the list in any case, to find new matches: at the first poll, and then every
``discoveryInterval``.

A stream that a list lacks is requested by itself: only the response that it does not exist proves
that. A query of listed names does not need the permission for ``STREAM.LIST``; without it, each
stream is requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.errors import (
    ConfigurationError,
    MinLastSequenceError,
    OffsetError,
    PermissionDeniedError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import PAGE, JetStream, StreamList
from nats_stream_source.jetstream.kv.bucket import Bucket
from nats_stream_source.jetstream.leader import wait_for_last_seq
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.logs import field_logger
from nats_stream_source.rows.base import FormatAdapter, StreamView
from nats_stream_source.rows.data_loss import other_messages, report_data_loss
from nats_stream_source.rows.offsets import ONE_STREAM, Offset, name_some

log = field_logger(__name__)

MAX_STREAMS = 32
"""Streams for which requests run at a time, in a query of several."""


class StreamStates:
    """Requests the states of the streams that a query reads.

    Attributes:
        requests: the number of requests of the last poll.
    """

    def __init__(
        self, adapter: FormatAdapter, connection: ReusableConnection, clock: Callable[[], float]
    ) -> None:
        self._adapter = adapter
        self._set = adapter.stream_set
        self._connection = connection
        self._clock = clock
        self._one: str | None = None  # the stream of a query of one, when it is known
        self._views: dict[str, StreamView] = {}  # the last ones
        self._list = StreamList()
        self._may_list = True
        self._listed_at: float | None = None
        self._reported: set[str] = set()
        self._listed: set[str] = set()  # those of the last list that the options select
        self.requests = 1

    async def verify(self, offset: Offset) -> None:
        """Raise OffsetError for an offset of other streams or with other filters."""
        adapter = self._adapter
        if self._set is None:
            await self._verify_one(offset)
        elif offset.streams and not any(map(adapter.selects, offset.streams)):
            raise OffsetError(
                f"could not resume from the checkpoint: it is of {name_some(offset.streams)}, "
                f"and {self._set} selects none of them; use the same option or another checkpoint "
                f"location"
            )
        if offset.filter != adapter.user_filters:
            option = adapter.terms.filter_option
            raise OffsetError(
                f"could not resume from the checkpoint: it was written with {option}="
                f"{','.join(offset.filter) or '(all)'}, the query has {option}="
                f"{','.join(adapter.user_filters) or '(all)'}, and resuming with different filters "
                f"would skip messages; use the same option {option!r} or another checkpoint "
                f"location"
            )

    async def _verify_one(self, offset: Offset) -> None:
        names = name_some(offset.streams)
        if offset.version != ONE_STREAM:
            raise OffsetError(
                f"could not read the checkpoint's offset: it is of several streams ({names}), and "
                f"the query reads one; set the options of several streams again, such as "
                f"'buckets' or 'streams', or use another checkpoint location"
            )
        stream = await self._stream_of_one()
        if stream not in offset.streams:
            raise OffsetError(
                f"could not resume from the checkpoint: it is of stream {names}, the query reads "
                f"{stream} ({self._adapter.terms.stream_option}); use the checkpoint's stream or "
                f"another checkpoint location"
            )

    async def _stream_of_one(self) -> str:
        """The stream of a query of one; looked up once where only a subject is configured."""
        if self._one is None:
            self._one = await self._adapter.stream_name(await self._connection.jetstream())
        return self._one

    async def request(self, stream: str) -> StreamView:
        """Request the state of one stream."""
        jetstream = await self._connection.jetstream()
        return await self._view(jetstream, await self._adapter.stream_info(jetstream, stream))

    async def reuse(self, info: StreamInfo) -> StreamView:
        """The view of an earlier response, over a connection that responds now."""
        return await self._view(await self._connection.jetstream(), info)

    async def _view(self, jetstream: JetStream, info: StreamInfo) -> StreamView:
        last = self._views.get(info.name)
        # Without a message the origin of a mirror is unknown.
        if last is not None and last.info.config == info.config and last.info.messages:
            info, scope = replace(info, origin=last.info.origin), last.scope
        else:
            info = await self._adapter.completed(jetstream, info)
            scope = self._adapter.read_scope(info)
            if last is not None and last.scope.prefix != scope.prefix and last.info.messages:
                report_data_loss(
                    self._adapter,
                    info.name,
                    f"the subjects of its entries were changed from {last.scope.prefix}> to "
                    f"{scope.prefix}>, as by the promotion of a mirror: unread entries of the "
                    f"former are not read; give the stream the subject {last.scope.prefix}> to "
                    f"read them",
                    f"continue with {scope.prefix}>",
                )
        view = self._views[info.name] = StreamView(jetstream, info, scope)
        return view

    async def poll(self, known: Iterable[str] = ()) -> dict[str, StreamView]:
        """The present streams of the query by name, each as its leader reports it.

        Args:
            known: the streams of an offset. Those of the last list are requested too.
        """
        if self._set is None:
            view = await self.request(await self._stream_of_one())
            return {view.info.name: view}
        jetstream = await self._connection.jetstream()
        infos = await self._poll_set(jetstream, known)
        return {name: await self._view(jetstream, info) for name, info in infos.items()}

    async def first_poll(self) -> dict[str, StreamView]:
        """The streams of a new query, once they have its ``min_last_seq`` (ADR-53)."""
        views = await self.poll()
        min_last_seq = self._adapter.min_last_seq or 0
        for name, view in views.items():
            if view.info.last_seq < min_last_seq:
                try:
                    await wait_for_last_seq(view.jetstream, name, min_last_seq)
                except MinLastSequenceError as error:
                    raise MinLastSequenceError(
                        f"{error}; the option {self._adapter.terms.min_last_option!r} is for the "
                        f"first start of a query: remove it for a query that has a checkpoint, or "
                        f"whose stream was re-created or rolled back"
                    ) from None
                views[name] = await self.request(name)
        return views

    async def _poll_set(self, jetstream: JetStream, known: Iterable[str]) -> dict[str, StreamInfo]:
        assert self._set is not None
        names = {self._adapter.stream_of(name) for name in self._set.names}
        names.update(self._listed, filter(self._adapter.selects, known))
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
        found = {name: info for name, info in listed.items() if self._adapter.selects(name)}
        self._listed = set(found)
        missing = await self._request_each(jetstream, names - found.keys())
        self.requests = self._list.requests + len(names - found.keys())
        return dict(sorted((found | missing).items()))

    async def verify_listed(
        self, views: Mapping[str, StreamView], *, must_exist: bool = True
    ) -> None:
        """Report listed names that do not exist, and once in the log, that there is no stream.

        Args:
            views: the streams that :meth:`poll` returned.
            must_exist: whether a missing name is an error; else a warning, once.
        """
        if self._set is None:
            return
        for name in self._set.names:
            stream = self._adapter.stream_of(name)
            if stream in views:
                continue
            if not must_exist:
                self.warn_once("stream does not exist, the query waits for it", stream=stream)
                continue
            try:
                await self._adapter.stream_info(await self._connection.jetstream(), stream)
            except StreamNotFoundError as error:
                raise type(error)(f"could not read {self._set}: {error}") from error
        if self._set.pattern is not None and not views:
            self.warn_once("no name matches the pattern", option=str(self._set))

    def warn_once(self, text: str, **fields: str) -> None:
        """Log a warning that was not logged before."""
        about = f"{text} {fields}"
        if about not in self._reported:
            self._reported.add(about)
            log.warning(text, **fields)  # type: ignore[arg-type]

    def _lists(self, streams: int) -> bool:
        """Whether the next poll lists all streams of the account."""
        assert self._set is not None
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


async def verify_filters(adapter: FormatAdapter, views: Iterable[StreamView]) -> None:
    """Verify that a query can have a row."""
    of_streams = list(views)
    refused: list[ConfigurationError] = []

    async def verify(view: StreamView) -> None:
        try:
            await adapter.verify_filters(view.jetstream, view.info)
        except ConfigurationError as error:
            refused.append(error)

    await gather_limited(verify, of_streams, MAX_STREAMS)
    if of_streams and len(refused) == len(of_streams):
        raise refused[0]


async def warn_of_other_subjects(view: StreamView, due: float = 1.0) -> float:
    """Log the number of messages that a query of a bucket does not read, once for each stream.

    No read of a bucket returns messages of its stream that are not entries of the bucket
    (``jetstream.kv.requests``), and no error reports them. Only a stream that can have such
    messages is counted, with two requests: the keys of most buckets cover theirs. Without such
    messages, the next count follows when the last sequence has doubled, so that the plannings of a
    long query share a few.

    Args:
        due: the last sequence from which on the messages are counted.

    Returns:
        ``due`` of the next call.
    """
    info, prefix = view.info, view.scope.prefix
    if not (prefix and info.messages) or info.last_seq < due or Bucket.of(info).covers_stream:
        return due
    others = await other_messages(view.jetstream, info, prefix) or 0
    if not others:
        return 2.0 * info.last_seq
    action = (
        f"give each source of the stream a subject transform to {prefix}> and remove other "
        f"subjects, or read the stream with nats_stream"
    )
    if info.config.get("mirror"):
        action = (
            f"the entries of the mirrored bucket are expected below {prefix}>: read other messages "
            f"of the stream with nats_stream"
        )
    log.warning(
        "the stream has messages that are not entries of the bucket and are not read",
        stream=info.name,
        messages=others,
        action=action,
    )
    return math.inf
