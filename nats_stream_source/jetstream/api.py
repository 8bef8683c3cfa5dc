"""JetStream's request/reply API: stream info, messages at the leader, consumers.

``STREAM.INFO`` and ``STREAM.MSG.GET`` are answered by the stream's leader, so what they say is the
stream's present state (DESIGN 3.5); everything that decides anything asks them. Times are strings
as the server writes them (RFC 3339, nanoseconds) or integers in nanoseconds since 1970.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import (
    ApiError,
    ConsumerLimitError,
    ConsumerNotFoundError,
    JetStreamNotEnabledError,
    MessageNotFoundError,
    ProtocolError,
    RequestTimeoutError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.answer import (
    decoded,
    items,
    moment,
    number,
    octets,
    stream_config,
    table,
    text,
)
from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.finishing import finish
from nats_stream_source.jetstream.together import together

_BY_CODE: dict[int, type[ApiError]] = {
    error.err_code: error
    for error in (
        JetStreamNotEnabledError,
        StreamNotFoundError,
        ConsumerLimitError,
        ConsumerNotFoundError,
        MessageNotFoundError,
    )
    if error.err_code is not None
}

_SILENCE = 3_000_000_000  # nanoseconds; followers that hear nothing for 4 s elect another leader
_PAGES_OVERLAP = 100  # subjects that may go away between two pages of a list, unnoticed


@dataclass(frozen=True, slots=True)
class Replica:
    """A follower, as the leader has it.

    ``lag`` is how many operations it is behind. ``active`` are the nanoseconds since the leader
    heard of it; 0 if it never did, which also a dead one keeps that was down at the election.
    """

    name: str
    lag: int
    active: int

    @property
    def heard(self) -> bool:
        """Whether the leader has just heard of it."""
        return 0 < self.active < _SILENCE


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What ``STREAM.INFO`` says of a stream.

    ``last_time`` is the time of the message at ``last_seq``, None when the stream never had
    one, or the server does not know it any more;
    ``subjects`` is how many subjects have messages, ``messages`` how many there are and ``nbytes``
    what they take in the store.
    ``config`` is the server's own configuration object, ``now`` the server's time, ``leader`` the
    name of the server that leads the stream, None outside of a cluster; ``replicas`` are the
    others.
    """

    name: str
    created: str
    first_seq: int
    last_seq: int
    last_time: str | None
    subjects: int
    messages: int
    nbytes: int
    config: dict[str, Any]
    now: str | None = None
    leader: str | None = None
    replicas: tuple[Replica, ...] = ()
    consumers: int = 0

    @property
    def consumers_left(self) -> int | None:
        """How many more consumers the stream allows; None for any number (accounts differ)."""
        most: int = self.config.get("max_consumers", -1)
        return max(0, most - self.consumers) if most > 0 else None

    @property
    def replicated(self) -> bool:
        """Whether more than one server has the stream."""
        return bool(self.config.get("num_replicas", 1) > 1)

    def check_majority(self) -> None:
        """Raise RequestTimeoutError where another server may lead the stream by now.

        One that is cut off from the others answers for 10 to 20 s as if it still led, with what it
        had: what it lacks proves nothing.
        """
        if 2 * sum(one.heard for one in self.replicas) < len(self.replicas):
            raise RequestTimeoutError(
                f"server {self.leader} says that it leads stream {self.name}, and has not heard of "
                f"most of its replicas for seconds: another one may have more than "
                f"{self.last_seq}"
            )

    def check_leads_on(self, now: StreamInfo, through: int) -> None:
        """Raise RequestTimeoutError unless ``now`` is of the same leader, which has ``through``.

        What was asked of the leader in between and not found is then not there. Where a stream has
        replicas, the server that led it until a moment ago may have answered, which does not have
        what came since.
        """
        if not self.replicated:
            return
        if (now.created, now.leader) != (self.created, self.leader) or now.last_seq < through:
            raise RequestTimeoutError(
                f"the leader of stream {self.name} changed from {self.leader} to {now.leader} "
                f"while it was asked"
            )
        now.check_majority()

    @classmethod
    def parse(cls, answer: dict[str, Any]) -> StreamInfo:
        """From the API's JSON object; ProtocolError when it is none of a stream."""
        last_time = moment(answer, "state", "last_ts")
        cluster = table(answer, "cluster", default={})
        config = stream_config(answer, "config")
        return cls(
            name=text(config, "name"),
            created=moment(answer, "created"),
            first_seq=number(answer, "state", "first_seq"),
            last_seq=number(answer, "state", "last_seq"),
            # The year 1 is the server's way to say that it does not know.
            last_time=None if last_time.startswith("0001-") else last_time,
            subjects=number(answer, "state", "num_subjects", default=0),
            messages=number(answer, "state", "messages"),
            nbytes=number(answer, "state", "bytes"),
            config=config,
            now=moment(answer, "ts") if "ts" in answer else None,
            leader=text(cluster, "leader", default="") or None,
            consumers=number(answer, "state", "consumer_count", default=0),
            replicas=tuple(
                Replica(
                    name=text(one, "name", default=""),
                    lag=number(one, "lag", default=0),
                    active=number(one, "active", default=0),
                )
                for one in items(cluster, "replicas")
            ),
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
        answer = decoded(message.data, full)
        if error := table(answer, "error", default={}):
            raise api_error(subject, error)
        return answer

    async def stream_info(self, stream: str) -> StreamInfo:
        """State and configuration of a stream; StreamNotFoundError when there is none."""
        info = StreamInfo.parse(await self.call(f"STREAM.INFO.{stream}"))
        if info.name != stream:
            raise ProtocolError(f"asked for stream {stream!r}, the server answers of {info.name!r}")
        return info

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
        message = table(answer, "message")
        return StoredMessage(
            subject=text(message, "subject"),
            seq=number(message, "seq"),
            time=moment(message, "time"),
            data=octets(message, "data"),
            headers=octets(message, "hdrs"),
        )

    async def last_seq(self, stream: str, filters: Sequence[str]) -> int:
        """The sequence of the leader's last message that matches a filter (none: all); or 0."""

        async def last(subject: str) -> StoredMessage | None:
            return await self.message(stream, last_by_subj=subject)

        found = await together(last, filters or (">",))
        return max((message.seq for message in found if message is not None), default=0)

    async def api_level(self) -> int:
        """Which API the servers speak: 0 before 2.11, 1 from there on, more with later ones."""
        return number(await self.call("INFO"), "api", "level", default=0)

    async def subjects(self, stream: str, filter_subject: str, most: int | None = None) -> set[str]:
        """The subjects that have messages now and match a filter, as the leader knows them.

        With ``most`` it stops when more than so many were found.
        """
        return set(await self.subject_counts(stream, filter_subject, most))

    async def subject_counts(
        self, stream: str, filter_subject: str, most: int | None = None
    ) -> dict[str, int]:
        """:meth:`subjects`, and how many messages each of them has."""
        names: dict[str, int] = {}
        offset, last = 0, ""
        while True:
            request = {"subjects_filter": filter_subject, "offset": offset}
            answer = await self.call(f"STREAM.INFO.{stream}", request)
            found = table(answer, "state", "subjects", default={})
            if offset and (not found or min(found) > last):
                # Subjects went away, and the sorted list moved up by more than the pages overlap.
                offset = max(0, offset - 10 * _PAGES_OVERLAP)
                continue
            names.update(found)
            if not found or offset + len(found) >= number(answer, "total", default=0):
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
        return number(await self.add_consumer(stream, {"name": name, **config}), "num_pending")

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
        answer = await self.call("STREAM.NAMES", {"subject": subject})
        return [str(name) for name in items(answer, "streams")]

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer; ConsumerNotFoundError when there is none."""
        await self.call(f"CONSUMER.DELETE.{stream}.{name}")


def api_error(subject: str, error: dict[str, Any]) -> ApiError:
    """The exception for the ``error`` object of an answer on ``subject``."""
    code, err_code = number(error, "code", default=0), number(error, "err_code", default=0)
    said = f"{subject}: {error.get('description')} (code {code}, err_code {err_code})"
    if err_code == JetStreamNotEnabledError.err_code:
        said += (
            ". If another account or domain has it, the options 'domain' and 'apiPrefix' lead to it"
        )
    if err_code == ConsumerLimitError.err_code:
        said += (
            ". Each task that reads has a consumer: the stream's or the account's 'max_consumers' "
            "must allow as many as tasks run at a time, beside those that are there"
        )
    return _BY_CODE.get(err_code, ApiError)(said, code or None, err_code or None)
