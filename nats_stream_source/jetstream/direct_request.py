"""One Direct Get request and its answers (ADR-31).

Each request has an inbox of its own, so an answer that comes late, to a request that was given up,
reaches nobody. Its answers are taken as frames (``wire/answers.py`` reads them), because nats-py's
message would show a publisher's ``Status`` field as the server's.

The server sends a batch without flow control, all of it at once: what bounds the memory is what the
request asks for (``batch``, ``max_bytes``).
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import (
    ApiError,
    BadRequestError,
    MinLastSequenceError,
    ServerTooOldError,
    TooManySubjectsError,
)
from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.page import AnswerPage
from nats_stream_source.wire.answers import (
    BAD_REQUEST,
    EOB,
    MIN_LAST_SEQUENCE,
    NOBODY,
    NOT_FOUND,
    TOO_MANY,
    Chain,
    Status,
)
from nats_stream_source.wire.frames import Frames

SILENCE = 1.0
"""Seconds without anything new after which no more is expected: the server that answers is paused,
or what was sent is lost, or an account import lets one message through (DESIGN 3.15)."""

one_answer_only: weakref.WeakSet[Connection] = weakref.WeakSet()
"""Connections that let one message of a batch through: nobody asks for a batch there again."""


@dataclass(frozen=True, slots=True, repr=False)
class Reply:
    """All that came of one request.

    Attributes:
        page: the messages up to the first that is missing.
        status: what ended them; None where they just ceased, or one is missing.
        lost: the connection was lost meanwhile.
    """

    page: AnswerPage
    status: Status | None
    lost: bool = False

    def __repr__(self) -> str:
        return f"<Reply {self.page!r} status={self.status} lost={self.lost}>"

    @property
    def code(self) -> int | None:
        """The status code, None where there is no status."""
        return self.status.code if self.status else None

    @property
    def cut_to_one(self) -> bool:
        """Whether one message of a batch came and then nothing, as through some account imports."""
        answers = self.page.answers
        return (
            self.status is None
            and not self.lost
            and len(answers) == 1
            and answers[0].pending is not None
        )

    def speaks_for(self, stream: str) -> bool:
        """Whether every message was read from ``stream`` itself, not from a mirror of it."""
        return self.page.answers.all_from(stream)


async def ask(
    connection: Connection,
    subject: str,
    request: dict[str, Any] | None,
    *,
    silence: float | None = None,
) -> Reply:
    """Send one Direct Get request and take its answers until they are over.

    Args:
        subject: below the API prefix: ``DIRECT.GET.<stream>`` or, without a request,
            ``DIRECT.GET.<stream>.<subject>``.
        request: the body (ADR-31, "Request"), None for the subject-appended form. With ``batch``
            or ``multi_last`` the answers are over with the EOB, else with the first one.
        silence: seconds; :data:`SILENCE` when None.

    Raises:
        PermissionDeniedError: the user may not ask there.
        ConnectError: no connection, or it was closed.
        ProtocolError: an answer is neither a message nor a status.
    """
    await connection.until_connected(connection.settings.connect_timeout)
    patience = SILENCE if silence is None else silence
    many = request is not None and bool(request.get("batch") or request.get("multi_last"))
    payload = b"" if request is None else json.dumps(request).encode()
    full = f"{connection.settings.api_prefix}.{subject}"
    reply_to = connection.client.new_inbox()
    reconnects = connection.reconnects
    inbox = await connection.inbox(reply_to)
    chain = Chain()

    async def receive() -> bool:
        """Whether the connection was lost."""
        await connection.client.publish(full, payload, reply=reply_to)
        while True:
            if arrived := inbox.take():
                chain.take(Frames.chain(arrived))
            # What a server before 2.11 answers to a batch has no number: nothing follows it.
            if chain.over or (len(chain) and not (many and chain.numbered)):
                return False
            if connection.reconnects != reconnects or not connection.client.is_connected:
                return True
            if not await inbox.wait(patience):
                return False

    try:
        lost = await connection.until_denied(full, receive)
    finally:
        await connection.release(inbox)
    status = None if chain.broken else chain.status
    reply = Reply(AnswerPage(chain.answers), status, lost)
    if many and reply.cut_to_one and not chain.broken:
        one_answer_only.add(connection)
    return reply


def check(
    stream: str, reply: Reply, *, needs: str | None = None, subjects: Sequence[str] = ()
) -> None:
    """Raise the error that the status of ``reply`` is; 204, 404 and 503 are none.

    Args:
        needs: the server version that knows the request: to an older one it is an empty request.
        subjects: those of a multi-subject request.

    Raises:
        BadRequestError: 408. ServerTooOldError: 408 from a server before ``needs``.
        MinLastSequenceError: 412. TooManySubjectsError: 413. ApiError: any other.
    """
    status = reply.status
    if status is None or status.code in (EOB, NOT_FOUND, NOBODY):
        return
    text = f"{stream}: {status.description or 'no description'} (Direct Get, {status.code})"
    if status.code == BAD_REQUEST and needs is not None and "Empty" in status.description:
        raise ServerTooOldError(f"{text}: this request needs nats-server {needs} or later")
    if status.code == BAD_REQUEST:
        raise BadRequestError(text, status.code)
    if status.code == MIN_LAST_SEQUENCE and "min last sequence" in status.description.lower():
        raise MinLastSequenceError(text)
    if status.code == TOO_MANY:
        raise too_many(stream, subjects)
    raise ApiError(text, status.code)


def check_positive(**numbers: int | None) -> None:
    """Raise BadRequestError for a number below 1; None stands for none."""
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise BadRequestError(f"{name} is {value}, it must be 1 or more")


def too_many(stream: str, subjects: Sequence[str]) -> TooManySubjectsError:
    """The error for a multi-subject request that matches too much."""
    shown = ", ".join(map(repr, subjects[:3])) + (", …" if len(subjects) > 3 else "")
    return TooManySubjectsError(
        f"{stream}: more than 1,024 subjects match {shown}: ask for narrower subjects in several "
        f"requests, or read them with a watch or an ordered consumer (last_per_subject)",
        TooManySubjectsError.code,
    )
