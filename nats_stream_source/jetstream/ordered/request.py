"""The request for an ordered consumer. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nats_stream_source.logs import field_logger

if TYPE_CHECKING:
    # A task's process unpickles requests before it connects.
    from nats_stream_source.jetstream.stream_identity import KnownStream

log = field_logger(__name__)

ENDLESS = (1 << 63) - 1
"""The end of an unbounded range: a watch continues until it is closed."""


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """The messages in ``(start, end]`` that one ordered consumer delivers.

    Attributes:
        stream: the stream's name.
        known: the stream as it was when the range was chosen. The reader verifies that it is still
            the same: when it replaces a consumer, and after the last message of a bounded range.
        end: the last sequence, or :data:`ENDLESS`.
        filters: subjects, not overlapping; empty for the whole stream.
        prefix: the reader leaves out the messages whose subjects do not start with it. A stream has
            such messages if it stored them before its subjects were changed. A filter of the server
            costs time there (docs/internals/measurements.md, Servers 5), and servers ignore one
            that is the stream's subject (Servers 27).
        last_per_subject: deliver only the last message of each subject (``start`` is then 0).
        headers_only: omit payloads.
        batch_rows, batch_bytes: the maximum size of one yielded ``Frames``.
        at_leader: read only from the stream leader, once it has ``end``. Another replica may lag
            or lack messages, so its last message of a subject may not be the stream's. A range of
            few sequences is read without a consumer.
        eager: yield messages as they arrive, instead of full batches. An empty batch is the first
            one, and reports the progress that only a heartbeat shows.
        accumulate: receive the messages of some milliseconds at once, which takes less CPU time.
        min_last_seq: the sequence that the delivering replica must have processed (ADR-53). None:
            ``end``, or no such sequence in an unbounded range.
        heartbeat: seconds between idle heartbeats; at least 0.1.
        catch_up_timeout: seconds to wait, in total, for a replica that makes no progress towards
            ``min_last_seq``.
        attempts: the maximum number of consumers in a row that are lost without progress.
        server: read only from this server.
    """

    stream: str
    known: KnownStream
    start: int
    end: int
    filters: tuple[str, ...] = ()
    prefix: str = ""
    last_per_subject: bool = False
    headers_only: bool = False
    at_leader: bool = False
    batch_rows: int = 8192
    batch_bytes: int = 8 << 20
    eager: bool = False
    accumulate: bool = False
    min_last_seq: int | None = None
    heartbeat: float = 0.5
    catch_up_timeout: float = 30.0
    attempts: int = 10
    server: str | None = None

    def __str__(self) -> str:
        return f"{self.stream} {self.bounds}"

    @property
    def bounds(self) -> str:
        """The sequences, as ``(3, 20]``."""
        return f"({self.start}, {self.end}]"

    @property
    def subject_filters(self) -> tuple[str, ...]:
        """The filters for requests of the range's subjects; empty for the whole stream."""
        return self.filters or ((f"{self.prefix}>",) if self.prefix else ())

    @property
    def target(self) -> int:
        """The sequence that the replica must reach within ``catch_up_timeout``."""
        if self.min_last_seq is not None:
            return self.min_last_seq
        return self.start if self.end == ENDLESS else self.end

    @property
    def only_initial_values(self) -> bool:
        """Whether the range consists only of the last messages of its subjects."""
        return self.last_per_subject and self.end != ENDLESS


def report_left_out(stream: str, prefix: str, messages: int) -> None:
    """Log the number of messages that a read left out since their subjects lack ``prefix``."""
    if messages:
        log.warning(
            "messages of other subjects are left out",
            stream=stream,
            messages=messages,
            expected=f"{prefix}>",
            action="to see them, read the stream with nats_stream",
        )
