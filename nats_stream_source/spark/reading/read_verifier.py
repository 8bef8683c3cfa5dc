"""Verifies after a read that the stream is still the planned one, and that no message is missing.

If the stream was re-created, rolled back or truncated while it was read, the received rows are not
those that the offsets promise, and the task fails.
"""

from __future__ import annotations

from nats_stream_source.errors import (
    ConsumerLimitError,
    DataLossError,
    PermissionDeniedError,
    ProtocolError,
    RequestTimeoutError,
)
from nats_stream_source.jetstream.kv.other_messages import count_entries
from nats_stream_source.jetstream.leader import verify_last_seq
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.stream_identity import Identity, KnownStream, compare, identify
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.logs import field_logger
from nats_stream_source.spark.data_loss_report import report_aged_out
from nats_stream_source.spark.formats.base import FormatAdapter
from nats_stream_source.spark.formats.splits import Split
from nats_stream_source.spark.reading.gap_tracker import SequenceGapTracker
from nats_stream_source.wire.consumer.ack_subject import ack_tokens
from nats_stream_source.wire.framing.frames import Frames

log = field_logger(__name__)


class ReadVerifier:
    """Records the messages that were received of a split, and compares them with the plan."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._gaps: SequenceGapTracker | None = None
        if split.required_from is not None:
            self._gaps = SequenceGapTracker(split.required_from, split.expiry_allowed_through)
        self._last: tuple[int, int] | None = None  # sequence and timestamp

    def add(self, frames: Frames) -> None:
        """Record the next messages."""
        if not len(frames):
            return
        tokens = ack_tokens(frames)
        self._last = int(tokens.stream_seq[-1]), int(tokens.timestamp_ns[-1])
        if self._gaps is not None:
            self._gaps.add(tokens.stream_seq)

    async def verify(
        self, info: StreamInfo, connection: ReusableConnection, adapter: FormatAdapter
    ) -> None:
        """Compare the received messages with the plan.

        Args:
            info: the stream after the last message, as its leader reports it.

        Raises:
            DataLossError: required messages aged out, and ``failOnDataLoss`` is set; or the stream
                was rolled back, and the received messages may differ from the planned ones.
        """
        split = self._split
        await verify_fingerprint(info, split, connection, split.fingerprint, self._last)
        if self._gaps and (missing := self._gaps.aged_out(info.first_seq, split.range.end)):
            jetstream = await connection.jetstream()
            await report_aged_out(adapter, jetstream, info, *missing, filters=split.range.filters)


async def verify_fingerprint(
    info: StreamInfo,
    split: Split,
    connection: ReusableConnection,
    fingerprint: tuple[int, str] | None,
    last: tuple[int, int] | None = None,
) -> None:
    """Raise DataLossError if the stream was rolled back, even if it has grown again since.

    Args:
        info: the stream as its leader reports it now.
        fingerprint: sequence and timestamp of a message that the stream had; None if it had none.
        last: sequence and timestamp, in nanoseconds, of the last message that was read.
    """
    if fingerprint is None:
        return
    seq, time = fingerprint
    if last is not None and last[0] == seq <= info.last_seq:
        lost = last[1] != nanoseconds(time)  # the received message is the best evidence
    else:
        lost = await _is_lost(connection, info, KnownStream(split.range.created, seq, time))
    if lost:
        raise _rolled_back(split, f"sequence {seq} does not have the message that it had before")


def _rolled_back(split: Split, observed: str) -> DataLossError:
    # Rows from before and after are mixed: only a new plan is correct, under any setting.
    return DataLossError(
        f"data loss in stream {split.range.stream}: the stream was rolled back while the range "
        f"{split.range.bounds} was read: {observed}; load a batch again, or restart a streaming "
        f"query with failOnDataLoss=false to continue after the last message that is left"
    )


async def _is_lost(connection: ReusableConnection, info: StreamInfo, known: KnownStream) -> bool:
    """Whether the stream was rolled back; False where the permission for the request is missing."""

    async def is_lost() -> bool:
        try:
            return (await identify(await connection.jetstream(), info, known)).lost
        except PermissionDeniedError as error:
            log.info(
                "could not verify whether the stream was rolled back", stream=info.name, error=error
            )
            return False

    return await connection.retry_transient(is_lost)


async def verify_left_out(
    info: StreamInfo, split: Split, connection: ReusableConnection, messages: int
) -> None:
    """Raise ProtocolError if messages were left out that the stream does not have.

    Args:
        info: the stream after the read.
        messages: the number of those whose subjects lack the prefix of the range.
    """

    async def other_messages() -> int:
        try:
            jetstream = await connection.jetstream()
            return (await count_entries(jetstream, info, split.range.prefix))[1]
        except (PermissionDeniedError, ConsumerLimitError):
            return messages

    if messages and not await connection.retry_transient(other_messages):
        raise ProtocolError(
            f"could not read stream {info.name!r}: {messages} messages of the range "
            f"{split.range.bounds} were received with subjects that do not start with "
            f"{split.range.prefix!r}, and the stream does not have such messages; a proxy may have "
            f"changed them: use TLS"
        )


async def verified_stream_info(
    connection: ReusableConnection,
    split: Split,
    adapter: FormatAdapter,
    known_last_seq: int | None = None,
) -> StreamInfo:
    """The stream after the read, as its leader reports it.

    Args:
        known_last_seq: the last sequence that the stream had since the plan; None for that of the
            plan, which :func:`verify_fingerprint` compares. A lower last sequence must be confirmed
            by a second response; a mirror that lags is waited for.

    Raises:
        RequestTimeoutError: a mirror does not catch up.
        DataLossError: the stream was re-created, or has a lower last sequence than
            ``known_last_seq``.
    """

    async def request() -> StreamInfo:
        jetstream = await connection.jetstream()
        info = await adapter.stream_info(jetstream, split.range.stream)
        expected = split.known_last_seq if known_last_seq is None else known_last_seq
        if info.last_seq < expected:
            known = KnownStream(split.range.created, expected)
            if compare(known, info) is Identity.LAGGING:
                raise RequestTimeoutError(
                    f"could not verify the read of stream {split.range.stream}: the mirror was "
                    f"rolled back to {info.last_seq}, expected {expected} or later; retry once it "
                    f"has caught up with its origin",
                    settings=(),
                )
            await verify_last_seq(jetstream, info, expected)
        return info

    info = await connection.retry_transient(request)
    verify_created(info, split)
    if known_last_seq is not None and info.last_seq < known_last_seq:
        raise _rolled_back(
            split, f"last sequence is {info.last_seq}, expected {known_last_seq} or higher"
        )
    return info


def is_recreated(info: StreamInfo, split: Split) -> bool:
    """Whether the stream was deleted and re-created since ``split`` was planned."""
    seq, time = split.fingerprint or (split.range.end, None)
    return compare(KnownStream(split.range.created, seq, time), info) is Identity.RECREATED


def verify_created(info: StreamInfo, split: Split) -> None:
    """Raise DataLossError if the stream was re-created since ``split`` was planned."""
    if is_recreated(info, split):
        # Rows of two streams may be mixed: only a new plan is correct, under any setting.
        raise DataLossError(
            f"data loss in stream {split.range.stream}: the stream was deleted and re-created "
            f"while the range {split.range.bounds} was read: it was created at {info.created}, "
            f"expected {split.range.created}; load a batch again, or restart a streaming query "
            f"with failOnDataLoss=false to continue with the re-created stream"
        )
