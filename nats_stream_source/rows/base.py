"""The interface between a format and the planner and readers that both formats share.

Planner and readers work with streams, sequences and subjects only. A :class:`FormatAdapter`
supplies the rest: the stream, the filter subjects, the start position, whether every message of a
range is required, and the layout of a row. It also supplies the terms for errors and warnings,
since a user of ``nats_kv`` works with buckets, keys and revisions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nats_stream_source.errors import UndecodableError
from nats_stream_source.jetstream.kv.bucket import UNMARKED_TTLS
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.logs import field_logger
from nats_stream_source.options import (
    DeliverPolicy,
    KvOptions,
    StartPosition,
    StreamOptions,
    StreamSet,
)
from nats_stream_source.options.reading import READ_CODECS
from nats_stream_source.options.table import add_option_hints

if TYPE_CHECKING:
    import pyarrow as pa

    from nats_stream_source.jetstream.api import JetStream
    from nats_stream_source.wire.consumer.deliveries import Deliveries

_log = field_logger(__name__)


@dataclass(frozen=True, slots=True)
class UserTerms:
    """The words of a format for errors and warnings.

    Attributes:
        sequence: the word for a stream sequence.
        stream_option: the options that name the stream.
        filter_option: the option that holds the filters.
        retention_hint: the setting that keeps messages for longer.
        start_anew: how to start without the position that was lost.
    """

    sequence: str
    stream_option: str
    filter_option: str
    retention_hint: str
    start_anew: str = "start a streaming query with a new checkpoint"

    @property
    def min_last_option(self) -> str:
        """The option that waits for a sequence: ``minLastRevision`` or ``minLastSequence``."""
        return f"minLast{self.sequence.capitalize()}"


@dataclass(frozen=True, slots=True)
class ReadScope:
    """The messages of a stream that a query reads, derived from the stream's configuration.

    Attributes:
        filters: the filter subjects; empty where they would cover the whole stream, since a filter
            costs time on the server (docs/internals/measurements.md, "Servers").
        covers_stream: whether the filters match every subject that the stream accepts now. The
            stream may still hold messages of other subjects that it accepted earlier; counts and
            range ends need no filter in either case.
        prefix: the part of every subject before the name that the user sees.
        history: the maximum number of messages per subject; -1 for no limit.
        silent_removals: the settings that remove a key without a row that reports it.
    """

    filters: tuple[str, ...]
    covers_stream: bool = False
    prefix: str = ""
    history: int = -1
    silent_removals: tuple[str, ...] = ()

    @property
    def effective_filters(self) -> tuple[str, ...]:
        """The filters that restrict new messages; empty if they match the whole stream."""
        return () if self.covers_stream else self.filters


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stream of a query as its leader reported it: what each method of a planning takes."""

    jetstream: JetStream
    info: StreamInfo
    scope: ReadScope

    async def verify_missing(self, through: int) -> None:
        """Verify that messages up to ``through`` that were not found do not exist.

        Raises:
            RequestTimeoutError: the stream leader changed, or reports a lower last sequence.
        """
        if self.info.replicated:
            now = await self.jetstream.stream_info(self.info.name)
            self.info.verify_same_leader(now, through)


class FormatAdapter(ABC):
    """One query of one format; Spark pickles it to the executors, for each task.

    Attributes:
        options: the options of the query. The other attributes are those that have another name in
            each format, or are derived from them.
        user_filters: the filters as the user wrote them, sorted; the checkpoint stores them.
        requires_all_messages: whether messages of a range that were removed before they were read
            are a data loss with any history; see :meth:`missing_is_loss`.
        headers_only: read without payloads.
        min_last_seq: start once the stream has this sequence (ADR-53).
        start_option: the option that set the start position; None for the format's default.
        stream_set: the buckets or streams of a query that reads several, by the names of the
            user; None if the query reads one.
    """

    options: KvOptions | StreamOptions
    user_filters: tuple[str, ...]
    requires_all_messages: bool
    headers_only: bool
    min_last_seq: int | None
    start_option: str | None = None
    stream_set: StreamSet | None
    terms: UserTerms

    @property
    def last_per_subject(self) -> bool:
        """Whether the query starts with the last message of each subject."""
        return self.options.start_position.policy is DeliverPolicy.LAST_PER_SUBJECT

    def stream_of(self, name: str) -> str:
        """The stream of a name of ``stream_set``."""
        return name

    def selects(self, stream: str) -> bool:
        """Whether ``stream_set`` has the stream."""
        return self.stream_set is not None and self.stream_set.selects(stream)

    def start_of(self, stream: str) -> StartPosition:
        """The start position of a stream of the query."""
        return self.options.start_position.of(stream)

    @abstractmethod
    async def stream_name(self, jetstream: JetStream) -> str:
        """The one stream's name; looked up on the server where only a subject is configured."""

    @abstractmethod
    async def stream_info(self, jetstream: JetStream, stream: str) -> StreamInfo:
        """The stream as its leader reports it.

        Raises:
            StreamNotFoundError, BucketNotFoundError: the stream does not exist.
        """

    async def completed(self, jetstream: JetStream, info: StreamInfo) -> StreamInfo:
        """``info`` with what :meth:`read_scope` needs beside the stream's configuration."""
        return info

    @abstractmethod
    async def verify_filters(self, jetstream: JetStream, info: StreamInfo) -> None:
        """Verify that the query can have a row; called only before its first one.

        Later the last message of a subject that the stream no longer accepts may have expired,
        which is not an error.

        Raises:
            ConfigurationError: the stream neither has nor accepts a message that a filter matches;
                NameTooLongError if no server accepts one.
        """

    @abstractmethod
    def read_scope(self, info: StreamInfo) -> ReadScope:
        """The messages of the stream that the query reads.

        Raises:
            UnsupportedStreamError: a range of the stream cannot be read a second time.
            ConfigurationError: the stream's subjects rule out a filter.
        """

    def report_silent_removals(self, info: StreamInfo, scope: ReadScope) -> None:
        """Log, once at a start, if current values can end without a row that reports it."""
        if scope.silent_removals and self.last_per_subject:
            # nats-py allows TTLs in every bucket that it creates: no sign that one is used.
            used = set(scope.silent_removals) != {UNMARKED_TTLS}
            (_log.warning if used else _log.info)(
                "keys can be removed without a marker, so that no row reports it; reconcile "
                "removes their rows from a table",
                stream=info.name,
                why=", ".join(scope.silent_removals),
            )

    def missing_is_loss(self, scope: ReadScope) -> bool:
        """Whether messages of a range that were removed before they were read are a data loss.

        They are not for current values where the stream limits the messages per subject, since
        compaction removes superseded ones.
        """
        return self.requires_all_messages or scope.history == -1

    def range_request(
        self,
        scope: ReadScope,
        info: StreamInfo,
        start: int,
        end: int,
        *,
        last_per_subject: bool = False,
    ) -> RangeRequest:
        """The request of an ordered consumer for ``(start, end]``.

        The stream leader serves the consumer. A replica whose store was damaged (a flipped bit, a
        lost block) drops unreadable messages: its last sequence is the leader's, it counts as
        current, it is not repaired, and its consumers skip its missing messages like deleted ones.
        A lagging replica, or one whose clock expires messages earlier, differs from the leader for
        a while. Only the leader's messages are those of the stream.
        """
        # Deferred import: it loads nats-py, which a process that finds the formats does not need.
        from nats_stream_source.jetstream.stream_identity import KnownStream

        # A server rejects last_per_subject without a filter (error 10094).
        match_all = (f"{scope.prefix}>",) if last_per_subject else ()
        return RangeRequest(
            stream=info.name,
            known=KnownStream.of(info),
            start=start,
            end=end,
            filters=scope.filters or match_all,
            prefix=scope.prefix,
            last_per_subject=last_per_subject,
            headers_only=self.headers_only,
            at_leader=True,
        )

    def rows(self, frames: Deliveries, split: Split) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a split's messages as one record batch; nothing without rows."""
        if len(frames):
            batch = self.record_batch(frames, split)
            if batch.num_rows:
                yield batch

    def finish(self) -> None:  # noqa: B027  # a format without a report
        """Report the rows that were left out since the last call."""

    def reported(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task, then report what was left out."""
        try:
            yield from batches
        except UndecodableError as error:
            add_option_hints(error, READ_CODECS)
            raise
        finally:
            self.finish()

    @abstractmethod
    def record_batch(self, frames: Deliveries, split: Split) -> pa.RecordBatch:
        """The rows of a split's messages, in the order of ``frames``."""


@dataclass(frozen=True, slots=True)
class Split:
    """A range of a stream that one task reads, and the labels of its rows.

    Attributes:
        range: the request of the ordered consumer that reads it.
        initial_through: rows up to this sequence are initial values.
        required_from: the first sequence of the range that the stream had when it was planned, if
            every message is required: messages that age out before they are read are a data loss.
            None if compaction may remove messages.
        expiry_allowed_through: at the start of a query, messages up to this sequence may age out
            before the first row is read without being a data loss.
    """

    range: RangeRequest
    initial_through: int
    required_from: int | None = None
    expiry_allowed_through: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSplit(Split):
    """A range of which a task of a batch reads the last message of each subject.

    Attributes:
        as_of: the last ones at the end of the range (``reading.as_of``); else those of now, at
            least as new as the end (``reading.latest_values``).
        planned: the stream when the split was planned.
        history: the maximum number of messages per subject; -1 for no limit.
        subject_count: the number of subjects that the stream had; None where the query reads some
            of them only.
    """

    as_of: bool
    planned: StreamInfo
    history: int
    subject_count: int | None


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
