"""Direct Get (ADR-31): single messages and batches of a stream, from any replica or mirror.

A request goes to any replica of the stream, or to a mirror of it, so that reads are distributed.
In return (ADR-31, "A note on read-after-write coherency") the responding server may lag, and a
mirror may hold only a part of the stream (docs/internals/measurements.md, Servers 5). How this
module handles that:

- The leader confirms every 404 (``STREAM.MSG.GET``). The reply of a mirror is used only where a
  part of the stream is sufficient: for a message by its sequence, and for the last message of a
  single subject.
- As ADR-31 describes, a read may return less than the latest write. With ``min_last_seq`` (ADR-53)
  it does not: a message at that sequence or later proves that its server is current, and otherwise
  the leader is queried once it has reached that sequence.
- Where Direct Get is off (``allow_direct``) or not permitted, the leader is queried. A request that
  does not get a reply is repeated; a single message is requested from the leader at the same time.

``readers`` reads one message and batches, ``last_messages`` the last message of each subject.
Arguments are validated before a request is sent: a server responds to an invalid subject with 404,
as if no message matched, and to an invalid number or time with 408 or an API error. The errors here
name the argument instead.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from datetime import datetime
from typing import Any

from nats_stream_source.errors import (
    BadRequestError,
    ConfigurationError,
    InvalidNameError,
    ProtocolError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_get.last_messages import LastMessagesReader
from nats_stream_source.jetstream.direct_get.readers import (
    MAX_BYTES,
    BatchReader,
    PageLimits,
    SingleMessageReader,
    SingleRequest,
)
from nats_stream_source.jetstream.direct_get.request import stored_messages
from nats_stream_source.jetstream.subjects import validate_stream, validate_subject_filter
from nats_stream_source.jetstream.times import nanoseconds, rfc3339
from nats_stream_source.wire.consumer.deliveries import Deliveries

Time = str | int | datetime
"""An RFC 3339 string, nanoseconds since 1970, or an aware ``datetime``."""

_MAX_INTEGER = (1 << 64) - 1  # stream sequences are unsigned 64-bit integers


class DirectGet:
    """Direct Get from one stream (ADR-31).

    Args:
        jetstream: the connection and its API prefix; several readers may share one.
        stream: the stream's name.

    Raises:
        InvalidNameError: ``stream`` cannot be the name of a stream.

    In addition to the errors of each method, all methods raise BadRequestError, before a request is
    sent, for an argument that is of another type or out of range; StreamNotFoundError;
    PermissionDeniedError; RequestTimeoutError and ConnectError when neither a replica nor the
    leader responds; MinLastSequenceError (412, 10180) when the stream does not reach
    ``min_last_seq`` within ``timeout`` seconds (the connection's ``request_timeout`` when None).
    """

    def __init__(self, jetstream: JetStream, stream: str) -> None:
        self.jetstream = jetstream
        self.stream = validate_stream(stream)
        self._single = SingleMessageReader(jetstream, stream)

    async def get(
        self, seq: int, *, min_last_seq: int | None = None, timeout: float | None = None
    ) -> StoredMessage:
        """Return the message at a sequence (ADR-31, ``{seq}``).

        Raises:
            MessageNotFoundError: the leader has no message at ``seq``.
        """
        _validate_integer("seq", seq)
        _validate_read_after_write(min_last_seq, timeout)
        return await self._single.read(
            SingleRequest({"seq": seq}, None, True, min_last_seq, timeout)
        )

    async def last(
        self, subject: str, *, min_last_seq: int | None = None, timeout: float | None = None
    ) -> StoredMessage:
        """Return the last message of a subject, which may have wildcards.

        ADR-31, ``{last_by_subj}``. A subject without wildcards is requested in the
        subject-appended form, which is also allowed for a user whose permissions list single
        subjects.

        Raises:
            MessageNotFoundError: the leader has no such message. Where the user may not send
                requests to the leader, the responding replica or mirror has none, and the message
                reports that.
        """
        _validate_subject(subject)
        _validate_read_after_write(min_last_seq, timeout)
        literal = not set(subject.split(".")) & {"*", ">"}
        appended = subject if literal else None
        return await self._single.read(
            SingleRequest({"last_by_subj": subject}, appended, literal, min_last_seq, timeout)
        )

    async def next(
        self,
        subject: str = ">",
        *,
        seq: int = 1,
        start_time: Time | None = None,
        min_last_seq: int | None = None,
        timeout: float | None = None,
    ) -> StoredMessage:
        """Return the first message of a subject at or after ``seq``, or at or after ``start_time``.

        ADR-31, ``{seq, next_by_subj}`` and ``{start_time}``; the subject may have wildcards.

        Raises:
            MessageNotFoundError: the leader has no such message.
            ServerTooOldError: ``start_time`` requires nats-server 2.11.
        """
        _validate_subject(subject)
        _validate_read_after_write(min_last_seq, timeout)
        if start_time is None:
            _validate_integer("seq", seq)
            request: dict[str, Any] = {"seq": seq, "next_by_subj": subject}
        else:
            request = {
                "start_time": _validate_time("start_time", start_time),
                "next_by_subj": subject,
            }
        return await self._single.read(SingleRequest(request, None, False, min_last_seq, timeout))

    def batch(
        self,
        subject: str = ">",
        *,
        seq: int | None = None,
        start_time: Time | None = None,
        batch: int = 8192,
        max_bytes: int = MAX_BYTES,
        limit: int | None = None,
        min_last_seq: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[StoredMessage, None]:
        """Yield the messages of a subject, ascending by sequence (ADR-31, "Batched requests").

        These are all messages that the leader had when the first page was requested, and no later
        one. Where Direct Get does not read them, an ordered consumer does.

        Args:
            subject: may have wildcards.
            seq: the start sequence; 1 when ``start_time`` is None too.
            start_time: the start time, instead of ``seq``.
            batch: the maximum number of messages that a server sends for one request. It sends them
                all at once, so this bounds the memory.
            max_bytes: the maximum number of bytes alike; a single message may exceed it.
            limit: the maximum number of messages in total; unlimited when None.
            min_last_seq: the read includes this sequence (ADR-53).

        Raises:
            BadRequestError: also if both ``seq`` and ``start_time`` are given.

        Raises, during the iteration:
            ServerTooOldError: ``start_time`` requires nats-server 2.11.
            DataLossError: the stream was re-created or rolled back during the read.
        """
        return _messages(
            self.pages(
                subject,
                seq=seq,
                start_time=start_time,
                batch=batch,
                max_bytes=max_bytes,
                limit=limit,
                min_last_seq=min_last_seq,
                timeout=timeout,
            )
        )

    def pages(
        self,
        subject: str = ">",
        *,
        seq: int | None = None,
        start_time: Time | None = None,
        batch: int = 8192,
        max_bytes: int = MAX_BYTES,
        limit: int | None = None,
        min_last_seq: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[Deliveries, None]:
        """As :meth:`batch`, but yield whole pages, for columns: ``wire.columns.payloads(page)``."""
        _validate_subject(subject)
        if seq is not None and start_time is not None:
            raise BadRequestError(
                "invalid batch request: 'seq' and 'start_time' exclude each other"
            )
        _validate_integer("seq", seq, optional=True)
        _validate_integer("batch", batch)
        _validate_integer("max_bytes", max_bytes)
        _validate_integer("limit", limit, 0, optional=True)
        _validate_read_after_write(min_last_seq, timeout)
        reader = BatchReader(
            self.jetstream,
            self.stream,
            subject,
            PageLimits(batch, max_bytes, min_last_seq, timeout),
            seq=seq or 1,
            start_time=None if start_time is None else _validate_time("start_time", start_time),
            limit=limit,
        )
        return reader.pages()

    def last_for(
        self,
        subjects: Sequence[str],
        *,
        up_to_seq: int | None = None,
        up_to_time: Time | None = None,
        batch: int | None = None,
        max_bytes: int = MAX_BYTES,
        min_last_seq: int | None = None,
        timeout: float | None = None,
    ) -> LastMessages:
        """Yield the last message of each matching subject (ADR-31, "Multi-subject requests").

        At most 1,024 subjects may match. Each subject is yielded once, ascending by sequence
        within a page. No message is older than the one that the leader had when the first page was
        requested. The result's ``up_to_seq`` is the sequence of their point in time: another read,
        such as a batch or a watch, can go on after it.

        If a subject is written to during the read, and neither the responding server nor the
        stream has its message of the point in time, its newer message is yielded, unless
        ``up_to_seq`` or ``up_to_time`` excludes that.

        Args:
            subjects: may have wildcards and may overlap.
            up_to_seq: read the state at this sequence, as far as the stream still holds it.
            up_to_time: read the state just before this time (servers exclude a message at exactly
                this time).
            batch: the maximum number of messages of one page.
            max_bytes: the maximum number of bytes of one page.
            min_last_seq: as for :meth:`batch`.

        Raises:
            BadRequestError: also if ``subjects`` is empty, or both ``up_to_seq`` and ``up_to_time``
                are given (408).

        Raises, during the iteration:
            TooManySubjectsError: more than 1,024 subjects match (413).
            ServerTooOldError: ``up_to_time`` requires nats-server 2.11.
            DataLossError: the stream was re-created or rolled back during the read.
        """
        names = (subjects,) if isinstance(subjects, str) else subjects
        if not isinstance(names, Iterable) or not (names := tuple(names)):
            raise BadRequestError(
                f"invalid multi-subject request: subjects are {subjects!r}, expected one or more"
            )
        for name in names:
            _validate_subject(name)
        if up_to_seq is not None and up_to_time is not None:
            raise BadRequestError(
                "invalid multi-subject request: 'up_to_seq' and 'up_to_time' exclude each other"
            )
        _validate_integer("up_to_seq", up_to_seq, optional=True)
        _validate_integer("batch", batch, optional=True)
        _validate_integer("max_bytes", max_bytes)
        _validate_read_after_write(min_last_seq, timeout)
        return LastMessages(
            LastMessagesReader(
                self.jetstream,
                self.stream,
                names,
                PageLimits(batch, max_bytes, min_last_seq, timeout),
                up_to_seq=up_to_seq,
                up_to_time=None if up_to_time is None else _validate_time("up_to_time", up_to_time),
            )
        )


class LastMessages(AsyncIterator[StoredMessage]):
    """The messages that :meth:`DirectGet.last_for` reads: an async iterator."""

    def __init__(self, reader: LastMessagesReader) -> None:
        self._reader = reader
        self._messages = _messages(reader.pages())

    @property
    def up_to_seq(self) -> int | None:
        """The sequence of the point in time of the messages; None before the first message.

        A read that starts after it misses no message; it repeats a message that was yielded with a
        higher sequence.
        """
        return self._reader.up_to_seq

    def __aiter__(self) -> LastMessages:
        return self

    async def __anext__(self) -> StoredMessage:
        return await self._messages.__anext__()

    async def aclose(self) -> None:
        """End the read early."""
        await self._messages.aclose()


async def _messages(
    pages: AsyncGenerator[Deliveries, None],
) -> AsyncGenerator[StoredMessage, None]:
    async with contextlib.aclosing(pages) as open_pages:
        async for page in open_pages:
            for message in stored_messages(page):
                yield message


def _validate_integer(name: str, value: object, first: int = 1, *, optional: bool = False) -> None:
    """Raise BadRequestError unless ``value`` is an int (no bool) from ``first`` to 2**64 - 1."""
    if optional and value is None:
        return
    if type(value) is not int or not first <= value <= _MAX_INTEGER:
        raise BadRequestError(
            f"invalid argument {name!r}: {value!r}, expected an integer of {first} or more"
        )


def _validate_read_after_write(min_last_seq: object, timeout: object) -> None:
    """Raise BadRequestError for a ``min_last_seq`` or ``timeout`` of another type or below 0."""
    _validate_integer("min_last_seq", min_last_seq, 0, optional=True)
    if timeout is None:
        return
    if type(timeout) not in (int, float) or not 0 <= timeout < math.inf:  # type: ignore[operator]
        raise BadRequestError(f"invalid argument 'timeout': {timeout!r}, expected seconds")


def _validate_subject(subject: object) -> None:
    """Raise BadRequestError if ``subject`` is not a subject; whole tokens may be wildcards."""
    try:
        validate_subject_filter(subject)  # type: ignore[arg-type]
    except InvalidNameError as error:
        raise BadRequestError(f"invalid subject {subject!r}: {error}") from None


def _validate_time(name: str, value: object) -> str:
    """The argument ``name`` as an RFC 3339 timestamp; BadRequestError if it is not a time."""
    try:
        if type(value) is int or isinstance(value, (str, datetime)):
            text = rfc3339(value)
            nanoseconds(text)  # four digits of the year, as servers require
            return text
    except ConfigurationError:
        raise
    except (ProtocolError, OverflowError, ValueError, OSError):
        pass  # the last three: a year that the platform cannot represent
    raise BadRequestError(
        f"invalid argument {name!r}: {value!r}, expected an RFC 3339 timestamp with a time zone, "
        f"nanoseconds since 1970, or an aware datetime"
    )
