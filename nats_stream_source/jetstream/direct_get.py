"""Direct Get (ADR-31): messages of a stream, one or many, from whichever server is at hand.

A request goes to any replica of the stream, or to a mirror of it, so that reads are spread. The
price (ADR-31, "A note on read-after-write coherency"): who answers may lag, and a mirror may hold
only a part of the stream (DESIGN 3.5). What this module makes of that:

- An answer is never taken for more than it proves. A 404 is confirmed by the leader
  (``STREAM.MSG.GET``). A mirror's answer counts only where a part of the stream is enough for it to
  be right: for a message by its sequence, and for the last one of a single subject.
- What comes may be behind the latest write, as the document says, unless ``min_last_seq`` asks for
  more (ADR-53): then it is a message that proves it, or what the leader has once it is there.
- Where Direct Get is off (``allow_direct``), refused or not answered, the leader is asked.

One message: ``direct_single``. Many: :meth:`DirectGet.batch` and :meth:`DirectGet.last_for`; see
``direct_batch`` and ``direct_multi``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any

from nats_stream_source.errors import BadRequestError
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.direct_batch import BatchRequest, pages
from nats_stream_source.jetstream.direct_multi import last_messages
from nats_stream_source.jetstream.direct_multi_pages import LastRequest
from nats_stream_source.jetstream.direct_single import SingleReads
from nats_stream_source.jetstream.page import Page
from nats_stream_source.jetstream.times import rfc3339

Time = str | int | datetime
"""RFC 3339 text, nanoseconds since 1970, or an aware ``datetime``."""

MAX_BYTES = 8 << 20


class DirectGet:
    """Direct Get from one stream.

    Args:
        jetstream: the API prefix and the connection; any number may share one.
        stream: the stream's name.

    All methods raise, besides what they name: StreamNotFoundError; PermissionDeniedError;
    RequestTimeoutError and ConnectError when neither a replica nor the leader answers;
    MinLastSequenceError (412, 10180) when the stream does not reach ``min_last_seq`` within
    ``timeout`` seconds (the connection's ``request_timeout`` when None).
    """

    def __init__(self, jetstream: JetStream, stream: str) -> None:
        self.jetstream = jetstream
        self.stream = stream
        self._single = SingleReads(jetstream, stream)

    def __repr__(self) -> str:
        return f"<DirectGet {self.stream}{' (off: leader only)' if self._single.off else ''}>"

    async def get(
        self, seq: int, *, min_last_seq: int | None = None, timeout: float | None = None
    ) -> StoredMessage:
        """The message at a sequence (ADR-31, ``{seq}``).

        Raises:
            MessageNotFoundError: the leader has none there.
            BadRequestError: ``seq`` is below 1.
        """
        if seq < 1:
            raise BadRequestError(f"sequences begin at 1, there is no {seq}")
        return await self._single.read({"seq": seq}, None, True, min_last_seq, timeout)

    async def last(
        self, subject: str, *, min_last_seq: int | None = None, timeout: float | None = None
    ) -> StoredMessage:
        """The last message of a subject, which may have wildcards (ADR-31, ``{last_by_subj}``).

        A subject without wildcards is asked for in the subject-appended form, which also a user
        may ask whose permissions name single subjects.

        Raises:
            MessageNotFoundError: the leader has none. Where the user may not ask the leader, who
                answered had none, and the text says so.
            BadRequestError: the subject is empty.
        """
        _check_subject(subject)
        literal = not set(subject.split(".")) & {"*", ">"}
        appended = subject if literal else None
        return await self._single.read(
            {"last_by_subj": subject}, appended, literal, min_last_seq, timeout
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
        """The first message of a subject at ``seq`` or later, or at ``start_time`` or later.

        ADR-31, ``{seq, next_by_subj}`` and ``{start_time}``; the subject may have wildcards.

        Raises:
            MessageNotFoundError: the leader has none.
            BadRequestError: ``seq`` is below 1, or the subject empty.
            ServerTooOldError: ``start_time`` needs a server of version 2.11.
        """
        _check_subject(subject)
        if start_time is None:
            if seq < 1:
                raise BadRequestError(f"sequences begin at 1, there is no {seq}")
            request: dict[str, Any] = {"seq": seq, "next_by_subj": subject}
        else:
            request = {"start_time": rfc3339(start_time), "next_by_subj": subject}
        return await self._single.read(request, None, False, min_last_seq, timeout)

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
        """The messages of a subject, ascending, page by page (ADR-31, "Batched requests").

        Args:
            subject: may have wildcards.
            seq, start_time: where to begin: at this sequence (1 when None) or time.
            batch, max_bytes: the most messages and bytes that a server sends for one request. It
                sends them all at once, and this bounds the memory; one message may exceed it.
            limit: the most messages in all; no limit when None.
            complete: read all that the leader had when the first page was asked for, and nothing
                later. Pages that a mirror answered are not used, and where those who answer lag,
                an ordered consumer reads the rest. When False, what is there for whoever answers,
                to its end: for reading from mirrors near by.
            min_last_seq: what is read includes this sequence (ADR-53); implies ``complete``.

        Raises, while it is iterated:
            BadRequestError: ``seq`` and ``start_time`` both, or a number below 1.
            ServerTooOldError: the server is older than 2.11 and has no batches.
            DataLossError: the stream was deleted and made again meanwhile, or set back.
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
    ) -> AsyncGenerator[Page, None]:
        """As :meth:`batch`, but whole pages, as frames: for columns (``wire.columns``)."""
        _check_subject(subject)
        request = BatchRequest(
            stream=self.stream,
            subject=subject,
            seq=seq,
            start_time=None if start_time is None else rfc3339(start_time),
            batch=batch,
            max_bytes=max_bytes,
            limit=limit,
            complete=complete or min_last_seq is not None,
            min_last_seq=min_last_seq,
            timeout=timeout,
        )
        return pages(self.jetstream, request)

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
    ) -> AsyncGenerator[StoredMessage, None]:
        """The last message of each matching subject (ADR-31, "Multi-subject requests").

        At most 1,024 subjects may match; more is an error. Ascending by sequence within a page,
        each subject once.

        Args:
            subjects: may have wildcards and overlap.
            up_to_seq: as it was at this sequence, as far as the stream still holds that.
            up_to_time: as it was just before this time (so the servers read "up to").
            batch, max_bytes: the most messages and bytes of one page. All pages are of one point
                in time (``Nats-UpTo-Sequence``). A subject that is written to while pages are read,
                in a stream that keeps no older message of it, comes with the newer message, unless
                ``up_to_seq`` or ``up_to_time`` rules that out.
            complete: nothing is missing or older than what the leader had when the first page was
                asked for. Where a mirror or a replica that lags answers, the leader is asked for
                each subject, or an ordered consumer reads. When False, what whoever answers has.
            min_last_seq: as for :meth:`batch`.

        Raises, while it is iterated:
            TooManySubjectsError: more than 1,024 subjects match (413).
            BadRequestError: no subjects, or both ``up_to_seq`` and ``up_to_time`` (408).
            ServerTooOldError: the server is older than 2.11 and has no multi-subject requests.
        """
        request = LastRequest(
            stream=self.stream,
            subjects=(subjects,) if isinstance(subjects, str) else tuple(subjects),
            up_to_seq=up_to_seq,
            up_to_time=None if up_to_time is None else rfc3339(up_to_time),
            batch=batch,
            max_bytes=max_bytes,
            complete=complete or min_last_seq is not None,
            min_last_seq=min_last_seq,
            timeout=timeout,
        )
        return last_messages(self.jetstream, request)


async def _messages(pages: AsyncGenerator[Page, None]) -> AsyncGenerator[StoredMessage, None]:
    async with contextlib.aclosing(pages) as open_pages:
        async for page in open_pages:
            for message in page.messages():
                yield message


def _check_subject(subject: str) -> None:
    if not subject or any(not token or set(token) & set(" \t\r\n") for token in subject.split(".")):
        raise BadRequestError(f"{subject!r} is no subject")
