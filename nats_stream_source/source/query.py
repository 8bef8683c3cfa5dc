"""What a format tells planner and reader about what is to be read.

Both formats run on the same machinery, which knows streams, sequences and subjects only. A
:class:`Query` says the rest: which stream, which subjects, where to begin, whether every message of
a range counts, and what a row looks like. It also has the words for errors and warnings: a user of
``nats_kv`` thinks in buckets, keys and revisions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nats_stream_source.jetstream.settings import ConnectionSettings
from nats_stream_source.options import Beginning, KvOptions, Reading, StreamOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from nats_stream_source.jetstream.api import JetStream, StreamInfo
    from nats_stream_source.source.plan import Plan
    from nats_stream_source.wire.frames import Frames


@dataclass(frozen=True, slots=True)
class Words:
    """What a user calls things.

    Attributes:
        sequence: what a stream sequence is to the user.
        place: the options that name the stream.
        filters: the option that names the filters.
        keeps: what makes the stream keep messages for longer.
    """

    sequence: str
    place: str
    filters: str
    keeps: str


@dataclass(frozen=True, slots=True)
class Content:
    """What of a stream's messages a query reads, by the stream's configuration.

    Attributes:
        filters: the filter subjects; none where they would cover the whole stream, since a filter
            costs time (DESIGN 3.5).
        whole: whether the filters match all that the stream takes now. Other messages may be there
            from a time when it took others; counts and ends need no filter all the same.
        everything: a filter for all, for the server refuses ``last_per_subject`` without one
            (10094).
        prefix: what stands in every subject before what the user knows of it.
        history: how many messages of a subject are kept at most; -1 for any number.
        vanishing: why a key may vanish without a row that says so, in words.
    """

    filters: tuple[str, ...]
    whole: bool = False
    everything: str = ">"
    prefix: str = ""
    history: int = -1
    vanishing: tuple[str, ...] = ()

    @property
    def counted(self) -> tuple[str, ...]:
        """The filters as far as they make a difference to what is to come."""
        return () if self.whole else self.filters


class Query(ABC):
    """One query of one format. Immutable; pickled to the executors.

    Attributes:
        filter: the filters as the user wrote them, sorted; the checkpoint has them.
        every_message: whether messages of a range that are gone before they were read are a loss
            in any case; see :meth:`complete`.
        last_first: whether the query begins with each subject's last message.
        headers_only: leave payloads out.
        min_last_seq: begin once the stream has this sequence (ADR-53).
    """

    connection: ConnectionSettings
    beginning: Beginning
    reading: Reading
    filter: tuple[str, ...]
    every_message: bool
    last_first: bool
    headers_only: bool
    min_last_seq: int | None
    words: Words

    @abstractmethod
    async def stream(self, jetstream: JetStream) -> str:
        """The stream's name, looked up where only a subject is known."""

    @abstractmethod
    async def look(self, jetstream: JetStream, stream: str) -> StreamInfo:
        """The stream as its leader describes it; a named error when there is none."""

    @abstractmethod
    async def check(self, jetstream: JetStream, info: StreamInfo) -> None:
        """Look whether the query can ever have a row; asked before its first one only.

        Later it may be that the last message of a subject that the stream takes no more has
        expired, and nothing is wrong with that.

        Raises:
            ConfigurationError: the stream has no message that a filter matches, and takes none.
        """

    @abstractmethod
    def content(self, info: StreamInfo) -> Content:
        """What of the stream the query reads.

        Raises:
            UnsupportedStreamError: a stream that cannot be read again.
            ConfigurationError: a filter that the stream's subjects rule out.
        """

    def complete(self, content: Content) -> bool:
        """Whether messages of a range that are gone before they were read are a loss.

        Not for current values where the stream keeps so many of a subject: compaction is their
        nature.
        """
        return self.every_message or content.history == -1

    @abstractmethod
    def rows(self, frames: Frames, plan: Plan) -> pa.RecordBatch:
        """The rows of a split's messages."""


def query_of(options: KvOptions | StreamOptions) -> Query:
    """The query that ``options`` describe."""
    # Imported here, or every process that Spark starts to find the source would load nats-py.
    if isinstance(options, KvOptions):
        from nats_stream_source.source.kv_query import KvQuery

        return KvQuery(options)
    from nats_stream_source.source.stream_query import StreamQuery

    return StreamQuery(options)
