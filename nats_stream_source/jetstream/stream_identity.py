"""Whether a stream is still the stream that was read before.

=========  ===================================================  ===========
created    message at the known sequence                        identity
=========  ===================================================  ===========
same       same timestamp, or removed since                     same
same       another timestamp, or the last sequence is lower     rolled back
other      same timestamp, or removed since                     restored
other      another timestamp, or the last sequence is lower     rolled back
other      the stream lacks all messages of the earlier stream  re-created
any        the last sequence is lower, in a mirror              lagging
=========  ===================================================  ===========

nats-server 2.15 gives a restored stream a new creation time; earlier servers keep the old one. The
sequences and timestamps of the messages are those of the backup. So the oldest message tells a
restored stream from a re-created one: in a re-created stream it is later than the known message and
than the stream's creation. A stream that was restored from a backup older than the known message
is rolled back.

The messages of a mirror are those of its origin. A mirror that was deleted and created again, or
rolled back by a backup or a power loss, receives them again: it lags until it has reached the known
sequence, and then it counts as the same or as restored. A lagging mirror with messages that are all
later than the known one is re-created, with an origin that was. A mirror whose origin lacks the
known sequence lags for as long: the caller limits the wait, and then compares the mirror as it is
(``may_lag``).

Three cases are not detected: a roll-back after which the message at the known sequence was written
and removed again counts as the same stream or as a restored one; a restored stream whose messages
of the backup were all removed since counts as re-created; where the known sequence has no message
and so no timestamp, a re-created stream with messages from before its creation (a mirror that was
re-created with its origin) counts as restored if it lacks that sequence too, else as rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from nats_stream_source.errors import DataLossError, PermissionDeniedError
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.leader import verify_last_seq
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.logs import field_logger

log = field_logger(__name__)


class Identity(Enum):
    """What a stream is, compared with one that was read before; the value completes "it was …"."""

    SAME = "not changed"
    RESTORED = "restored from a backup"
    ROLLED_BACK = "rolled back"
    RECREATED = "deleted and re-created"
    LAGGING = "behind its origin"

    @property
    def lost(self) -> bool:
        """Whether messages that were read may be missing, or other messages have their place."""
        return self not in (Identity.SAME, Identity.RESTORED)


@dataclass(frozen=True, slots=True)
class KnownStream:
    """What is known of a stream from an earlier response.

    Attributes:
        created: its creation time.
        seq: a sequence that it had reached.
        time: timestamp of the message at ``seq``; None if it is unknown.
        gap: whether the stream did not have a message at ``seq``.
    """

    created: str
    seq: int = 0
    time: str | None = None
    gap: bool = False

    @classmethod
    def of(cls, info: StreamInfo) -> KnownStream:
        """The stream that ``info`` describes."""
        return cls(info.created, info.last_seq, info.last_time)


class StreamChangedError(DataLossError):
    """A stream was re-created or rolled back while it was read.

    Attributes:
        identity: what the stream is now.
        known: what was known of it.
        observed: what shows the change.
    """

    def __init__(self, stream: str, identity: Identity, known: KnownStream, observed: str) -> None:
        self.identity = identity
        self.known = known
        self.observed = observed
        super().__init__(
            f"could not read stream {stream!r}: it was {identity.value} during the read: "
            f"{observed}; start a new read"
        )


def has_older_messages(info: StreamInfo) -> bool:
    """Whether the stream has a message from before its creation, as restored ones and mirrors."""
    oldest = info.first_time or info.last_time
    return oldest is not None and nanoseconds(oldest) < nanoseconds(info.created)


def compare(
    known: KnownStream,
    info: StreamInfo,
    message: StoredMessage | KnownStream | None = None,
    *,
    may_lag: bool = True,
) -> Identity:
    """Compare a stream with what was known of it.

    Args:
        info: the stream as its leader reports it now.
        message: the first message at ``known.seq`` or later. Without it, the message at
            ``known.seq`` counts as removed.
        may_lag: whether a mirror without ``known.seq`` counts as lagging.
    """
    same_created = info.created == known.created
    at_seq = message is not None and message.seq == known.seq
    if message is not None and at_seq and message.time == known.time:
        return Identity.SAME if same_created else Identity.RESTORED
    continues = same_created or _continues(known, info)
    lags = may_lag and info.is_mirror and info.last_seq < known.seq
    if lags and (continues or info.first_time is None):
        return Identity.LAGGING
    if not continues:
        return Identity.RECREATED
    if info.last_seq < known.seq or (at_seq and (known.gap or known.time is not None)):
        # A server does not assign a sequence twice, except after a roll-back.
        return Identity.ROLLED_BACK
    if same_created:
        return Identity.SAME
    later = [time for time in (message and message.time, info.last_time) if time]
    if known.time and any(nanoseconds(time) < nanoseconds(known.time) for time in later):
        return Identity.ROLLED_BACK  # what follows the known sequence was written before it
    return Identity.RESTORED


def _continues(known: KnownStream, info: StreamInfo) -> bool:
    """Whether the oldest message of a stream with another creation time is of the known stream."""
    if info.first_time and known.time and info.first_seq <= known.seq:
        return nanoseconds(info.first_time) <= nanoseconds(known.time)
    return has_older_messages(info)


async def identify(
    jetstream: JetStream,
    info: StreamInfo,
    known: KnownStream,
    received: KnownStream | None = None,
    *,
    may_lag: bool = True,
) -> Identity:
    """:func:`compare`, with a request for the message where its timestamp is known.

    Args:
        received: the last message of a read. Another one at ``known.seq`` shows a roll-back. The
            known one does not show the opposite: the stream may have changed since it was read.

    Raises:
        RequestTimeoutError: a second response does not confirm a lower last sequence.
    """
    same_created = info.created == known.created
    comparable = 0 < known.seq <= info.last_seq and (known.gap or known.time is not None)
    message: StoredMessage | KnownStream | None = None
    if comparable and received and received.seq == known.seq and received.time != known.time:
        message = received
    elif same_created and (info.last_seq, info.last_time) == (known.seq, known.time):
        return Identity.SAME
    elif comparable:
        # The stream info is not sufficient: after its last message was deleted and the server was
        # killed, the server does not report a timestamp.
        following = None if same_created else ">"
        message = await jetstream.message(info.name, seq=known.seq, next_by_subj=following)
    identity = compare(known, info, message, may_lag=may_lag)
    if identity is Identity.ROLLED_BACK and info.last_seq < known.seq:
        await verify_last_seq(jetstream, info, known.seq)
    return identity


def verify_created(known: KnownStream, info: StreamInfo) -> None:
    """Raise StreamChangedError if the stream was re-created, as ``info`` alone shows."""
    if compare(known, info) is Identity.RECREATED:
        observed = f"it was created at {info.created}, expected {known.created}"
        raise StreamChangedError(info.name, Identity.RECREATED, known, observed)


async def verify_unchanged(
    jetstream: JetStream,
    info: StreamInfo,
    known: Iterable[KnownStream],
    received: KnownStream | None = None,
) -> bool:
    """Verify that a stream is the known one; returns whether it may be: a mirror that lags.

    Where the permission to request a message is missing, the message is not compared.

    Args:
        known: what is known of the stream, each compared by itself.
        received: as for :func:`identify`.

    Raises:
        StreamChangedError: the stream was re-created or rolled back.
        RequestTimeoutError: as :func:`identify`.
    """
    lags = False
    for one in known:
        verify_created(one, info)
        try:
            identity = await identify(jetstream, info, one, received)
        except PermissionDeniedError as error:
            log.info(
                "could not verify whether the stream was rolled back", stream=info.name, error=error
            )
            continue
        lags = lags or identity is Identity.LAGGING
        if identity.lost and identity is not Identity.LAGGING:
            observed = f"sequence {one.seq} does not have the message that it had before"
            if info.last_seq < one.seq:
                observed = f"its last sequence is {info.last_seq}, expected {one.seq} or later"
            raise StreamChangedError(info.name, identity, one, observed)
    return lags
