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

One message: ``single``. Many: :meth:`DirectGet.batch` and :meth:`DirectGet.last_for`, in ``batch``
and ``last_messages``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_get.arguments import (
    Time,
    validate_integer,
    validate_read_after_write,
    validate_subject,
    validate_subjects,
    validate_time,
)
from nats_stream_source.jetstream.direct_get.batch import BatchRequest, read_pages
from nats_stream_source.jetstream.direct_get.last_messages import LastMessages
from nats_stream_source.jetstream.direct_get.last_pages import LastMessagesRequest
from nats_stream_source.jetstream.direct_get.page import MessagePage
from nats_stream_source.jetstream.direct_get.single import SingleMessageReader, SingleRequest
from nats_stream_source.jetstream.subjects import validate_stream

MAX_BYTES = 8 << 20


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

    def __repr__(self) -> str:
        return f"<DirectGet {self.stream}{' (off: leader only)' if self._single.disabled else ''}>"

    async def get(
        self, seq: int, *, min_last_seq: int | None = None, timeout: float | None = None
    ) -> StoredMessage:
        """Return the message at a sequence (ADR-31, ``{seq}``).

        Raises:
            MessageNotFoundError: the leader has no message at ``seq``.
        """
        validate_integer("seq", seq)
        validate_read_after_write(min_last_seq, timeout)
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
        validate_subject(subject)
        validate_read_after_write(min_last_seq, timeout)
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
        validate_subject(subject)
        validate_read_after_write(min_last_seq, timeout)
        if start_time is None:
            validate_integer("seq", seq)
            request: dict[str, Any] = {"seq": seq, "next_by_subj": subject}
        else:
            request = {
                "start_time": validate_time("start_time", start_time),
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
        complete: bool = True,
        min_last_seq: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[StoredMessage, None]:
        """Yield the messages of a subject, ascending by sequence (ADR-31, "Batched requests").

        Args:
            subject: may have wildcards.
            seq: the start sequence; 1 when ``start_time`` is None too.
            start_time: the start time, instead of ``seq``.
            batch: the maximum number of messages that a server sends for one request. It sends them
                all at once, so this bounds the memory.
            max_bytes: the maximum number of bytes alike; a single message may exceed it.
            limit: the maximum number of messages in total; unlimited when None.
            complete: read every message that the leader had when the first page was requested, and
                no later one. Pages of a mirror are not used, and where the responding servers lag,
                an ordered consumer reads the rest. When False, read the messages that the
                responding server has, up to its end: for reads from a nearby mirror.
            min_last_seq: the read includes this sequence (ADR-53); implies ``complete``.

        Raises:
            BadRequestError: also if both ``seq`` and ``start_time`` are given.

        Raises, during the iteration:
            ServerTooOldError: batches require nats-server 2.11.
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
                complete=complete,
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
        complete: bool = True,
        min_last_seq: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[MessagePage, None]:
        """As :meth:`batch`, but yield whole pages of frames, for columns (``wire.columns``)."""
        request = BatchRequest(
            stream=self.stream,
            subject=subject,
            seq=seq,
            start_time=None if start_time is None else validate_time("start_time", start_time),
            batch=batch,
            max_bytes=max_bytes,
            limit=limit,
            complete=complete or min_last_seq is not None,
            min_last_seq=min_last_seq,
            timeout=timeout,
        )
        request.validate()
        return read_pages(self.jetstream, request)

    def last_for(
        self,
        subjects: Sequence[str],
        *,
        up_to_seq: int | None = None,
        up_to_time: Time | None = None,
        batch: int | None = None,
        max_bytes: int = MAX_BYTES,
        complete: bool = True,
        min_last_seq: int | None = None,
        timeout: float | None = None,
    ) -> LastMessages:
        """Yield the last message of each matching subject (ADR-31, "Multi-subject requests").

        At most 1,024 subjects may match. Each subject is yielded once, ascending by sequence
        within a page. The result's ``up_to_seq`` is the sequence of their point in time: another
        read, such as a batch or a watch, can go on after it.

        Args:
            subjects: may have wildcards and may overlap.
            up_to_seq: read the state at this sequence, as far as the stream still holds it.
            up_to_time: read the state just before this time (servers exclude a message at exactly
                this time).
            batch: the maximum number of messages of one page. All pages are of one point in time
                (``Nats-UpTo-Sequence``). If a subject is written to during the read, and the stream
                keeps no older message of it, its newer message is yielded, unless ``up_to_seq`` or
                ``up_to_time`` excludes that.
            max_bytes: the maximum number of bytes of one page.
            complete: every message of the point in time is read, and no message is older than the
                one that the leader had when the first page was requested. Where a mirror or a
                lagging replica responds, each subject is requested from the leader, or an ordered
                consumer reads. When False, read the messages that the responding server has.
            min_last_seq: as for :meth:`batch`.

        Raises:
            BadRequestError: also if ``subjects`` is empty, or both ``up_to_seq`` and ``up_to_time``
                are given (408).

        Raises, during the iteration:
            TooManySubjectsError: more than 1,024 subjects match (413).
            ServerTooOldError: multi-subject requests require nats-server 2.11.
        """
        request = LastMessagesRequest(
            stream=self.stream,
            subjects=validate_subjects(subjects),
            up_to_seq=up_to_seq,
            up_to_time=None if up_to_time is None else validate_time("up_to_time", up_to_time),
            batch=batch,
            max_bytes=max_bytes,
            complete=complete or min_last_seq is not None,
            min_last_seq=min_last_seq,
            timeout=timeout,
        )
        request.validate()
        return LastMessages(self.jetstream, request)


async def _messages(
    pages: AsyncGenerator[MessagePage, None],
) -> AsyncGenerator[StoredMessage, None]:
    async with contextlib.aclosing(pages) as open_pages:
        async for page in open_pages:
            for message in page.messages():
                yield message
