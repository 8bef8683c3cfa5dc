"""JetStream's request/reply API: stream info, messages at the leader, consumers.

``STREAM.INFO`` and ``STREAM.MSG.GET`` are answered by the stream's leader, so what they say is the
stream's present state (DESIGN 3.5); everything that decides anything asks them. Times are strings
as the server writes them (RFC 3339, nanoseconds) or integers in nanoseconds since 1970.
"""

from __future__ import annotations

import base64
import calendar
import json
import re
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from nats_stream_source.errors import (
    ApiError,
    ConfigurationError,
    ConsumerNotFoundError,
    JetStreamNotEnabledError,
    MessageNotFoundError,
    ProtocolError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.finishing import finish

_BY_CODE: dict[int, type[ApiError]] = {
    error.err_code: error
    for error in (
        JetStreamNotEnabledError,
        StreamNotFoundError,
        ConsumerNotFoundError,
        MessageNotFoundError,
    )
    if error.err_code is not None
}

_PAGES_OVERLAP = 100  # subjects that may go away between two pages of a list, unnoticed

_RFC3339 = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):(\d\d))"
)


def nanoseconds(text: str) -> int:
    """Nanoseconds since 1970 of an RFC 3339 time; ProtocolError when it is none."""
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ProtocolError(f"not a time: {text!r}")
    date, clock, fraction, sign, hours, minutes = match.groups()
    seconds = calendar.timegm(time.strptime(f"{date} {clock}", "%Y-%m-%d %H:%M:%S"))
    if sign:
        shift = int(hours) * 3600 + int(minutes) * 60
        seconds += shift if sign == "-" else -shift
    return seconds * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))


def rfc3339(when: str | int | datetime) -> str:
    """A time as the server writes it: RFC 3339 in UTC, nanoseconds, no trailing zeros.

    Args:
        when: such a text already (any offset), nanoseconds since 1970, or an aware ``datetime``.

    Raises:
        ProtocolError: a text that is no time.
        ConfigurationError: a ``datetime`` without a time zone.
    """
    if isinstance(when, str):
        when = nanoseconds(when)
    elif isinstance(when, datetime):
        if when.tzinfo is None:
            raise ConfigurationError(f"{when!r} has no time zone: say which one is meant")
        since = when - datetime(1970, 1, 1, tzinfo=timezone.utc)
        when = (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1000
    seconds, fraction = divmod(when, 1_000_000_000)
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{text}.{fraction:09d}".rstrip("0").rstrip(".") + "Z"


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What ``STREAM.INFO`` says of a stream.

    ``last_time`` is the time of the message at ``last_seq``, None when the stream never had
    one, or the server does not know it any more;
    ``subjects`` is how many subjects have messages, ``messages`` how many there are and ``nbytes``
    what they take in the store; ``lag`` is how many operations a replica is behind the leader, the
    slowest one, as far as the leader knows.
    ``config`` is the server's own configuration object.
    """

    name: str
    created: str
    first_seq: int
    last_seq: int
    last_time: str | None
    subjects: int
    messages: int
    nbytes: int
    lag: int
    config: dict[str, Any]

    @classmethod
    def parse(cls, answer: dict[str, Any]) -> StreamInfo:
        """From the API's JSON object."""
        state = answer["state"]
        return cls(
            name=answer["config"]["name"],
            created=answer["created"],
            first_seq=state["first_seq"],
            last_seq=state["last_seq"],
            # The year 1 is the server's way to say that it does not know.
            last_time=None if state["last_ts"].startswith("0001-") else state["last_ts"],
            subjects=state.get("num_subjects", 0),
            messages=state["messages"],
            nbytes=state["bytes"],
            lag=max(
                (one.get("lag", 0) for one in answer.get("cluster", {}).get("replicas") or ()),
                default=0,
            ),
            config=answer["config"],
        )


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as ``STREAM.MSG.GET`` returns it; ``time`` as the server writes it."""

    subject: str
    seq: int
    time: str
    data: bytes
    headers: bytes


class JetStream:
    """JetStream API calls over one connection.

    All methods raise ``RequestTimeoutError``, ``PermissionDeniedError``,
    ``JetStreamNotEnabledError`` and, for an error without a class of its own, ``ApiError`` with
    the server's codes.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def call(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """One API request below the connection's API prefix; the answer's JSON object."""
        full = f"{self.connection.settings.api_prefix}.{subject}"
        payload = json.dumps(request).encode() if request is not None else b""
        message = await self.connection.request(full, payload)
        try:
            answer = json.loads(message.data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ProtocolError(f"the answer on {full!r} is not a JSON object")
        if error := answer.get("error"):
            raise api_error(subject, error)
        return answer

    async def stream_info(self, stream: str) -> StreamInfo:
        """State and configuration of a stream; StreamNotFoundError when there is none."""
        return StreamInfo.parse(await self.call(f"STREAM.INFO.{stream}"))

    async def message(
        self,
        stream: str,
        *,
        seq: int | None = None,
        next_by_subj: str | None = None,
        last_by_subj: str | None = None,
        start_time: str | None = None,
        min_last_seq: int | None = None,
    ) -> StoredMessage | None:
        """The leader's message at ``seq``, the next from there or the last of a subject; or None.

        ``next_by_subj`` and ``last_by_subj`` may have wildcards. ``start_time`` (RFC 3339; since
        2.11, older servers ignore it) stands in for ``seq``. ``min_last_seq`` is for servers that
        know it, see ``read_after_write``: others ignore or refuse the field (DESIGN 3.1).
        """
        request: dict[str, Any] = {}
        if start_time is not None:
            request["start_time"] = start_time
        if min_last_seq is not None:
            request["min_last_seq"] = min_last_seq
        if seq is not None:
            request["seq"] = seq
        if next_by_subj is not None:
            request["next_by_subj"] = next_by_subj
        if last_by_subj is not None:
            request["last_by_subj"] = last_by_subj
        try:
            answer = await self.call(f"STREAM.MSG.GET.{stream}", request)
        except MessageNotFoundError:
            return None
        message = answer["message"]
        return StoredMessage(
            subject=message["subject"],
            seq=message["seq"],
            time=message["time"],
            data=base64.b64decode(message.get("data", "")),
            headers=base64.b64decode(message.get("hdrs", "")),
        )

    async def api_level(self) -> int:
        """Which API the servers speak: 0 before 2.11, 1 from there on, more with later ones."""
        return int((await self.call("INFO")).get("api", {}).get("level", 0))

    async def subjects(self, stream: str, filter_subject: str, most: int | None = None) -> set[str]:
        """The subjects that have messages now and match a filter, as the leader knows them.

        With ``most`` it stops when more than so many were found.
        """
        names: set[str] = set()
        offset, last = 0, ""
        while True:
            request = {"subjects_filter": filter_subject, "offset": offset}
            answer = await self.call(f"STREAM.INFO.{stream}", request)
            found = answer["state"].get("subjects") or {}
            if offset and (not found or min(found) > last):
                # Subjects went away, and the sorted list moved up by more than the pages overlap.
                offset = max(0, offset - 10 * _PAGES_OVERLAP)
                continue
            names.update(found)
            if not found or offset + len(found) >= answer.get("total", 0):
                return names
            if most is not None and len(names) > most:
                return names
            # Pages are of 100,000; in between, subjects may come and go.
            last = max(found)
            offset += max(len(found) - _PAGES_OVERLAP, 1)

    async def create_consumer(self, stream: str, name: str, config: dict[str, Any]) -> int:
        """Create a consumer under a new name; its ``num_pending`` at creation.

        As :meth:`add_consumer`, also cancelled it waits for the answer.
        """
        subject = f"CONSUMER.CREATE.{stream}.{name}"
        if config.get("filter_subject"):
            subject += f".{config['filter_subject']}"
        request = {"stream_name": stream, "config": {"name": name, **config}, "action": "create"}
        return int((await finish(self.call(subject, request)))["num_pending"])

    async def add_consumer(self, stream: str, config: dict[str, Any]) -> dict[str, Any]:
        """Create the consumer ``config["name"]``; the server's consumer info.

        A consumer of that name with another configuration is an ApiError (10148, 10013 or 10105);
        with the very same one, the server answers as if it had created it.

        Cancelled, it waits for the answer and raises then: servers create aside, so a deletion that
        is sent before the answer came finds nothing, and the consumer is there afterwards.
        """
        subject = f"CONSUMER.CREATE.{stream}.{config['name']}"
        if config.get("filter_subject"):
            subject += f".{config['filter_subject']}"
        request = {"stream_name": stream, "config": config, "action": "create"}
        return await finish(self.call(subject, request))

    async def consumer_info(self, stream: str, name: str) -> dict[str, Any]:
        """The server's consumer info; ConsumerNotFoundError when there is none."""
        return await self.call(f"CONSUMER.INFO.{stream}.{name}")

    async def streams_with(self, subject: str) -> list[str]:
        """The names of the streams that take ``subject``, which may have wildcards."""
        return list((await self.call("STREAM.NAMES", {"subject": subject})).get("streams") or [])

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer; ConsumerNotFoundError when there is none."""
        await self.call(f"CONSUMER.DELETE.{stream}.{name}")


def api_error(subject: str, error: dict[str, Any]) -> ApiError:
    """The exception for the ``error`` object of an answer on ``subject``."""
    code, err_code = error.get("code"), error.get("err_code")
    text = f"{subject}: {error.get('description')} (code {code}, err_code {err_code})"
    if err_code == JetStreamNotEnabledError.err_code:
        text += (
            ". If another account or domain has it, the options 'domain' and 'apiPrefix' lead to it"
        )
    return _BY_CODE.get(err_code or 0, ApiError)(text, code, err_code)
