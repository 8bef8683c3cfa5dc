"""JetStream's request/reply API: ``connect``, messages of the leader, consumers, lists of streams.

``connect`` is the entry point of a program without Spark. One connection serves any number of
concurrent buckets, watches and subscriptions::

    async with connect("nats://127.0.0.1:4222") as jetstream:
        fleet = await KeyValue.open(jetstream, "fleet")
        revision = await fleet.put("N14228", b"...")
        entry = await fleet.get("N14228", min_last_revision=revision)

The stream leader responds to ``STREAM.INFO`` and ``STREAM.MSG.GET``, so the responses have the
present state of the stream (docs/internals/measurements.md, Servers 5). Every decision of the
package uses them. Timestamps are strings as the server formats them (RFC 3339, nanoseconds), or
integers in nanoseconds since 1970.

The functions at the end help to read messages of the leader one by one: their subjects, the number
of concurrent requests, and the conversion to deliveries.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import nats.errors

from nats_stream_source.aio.tasks import MAX_CONCURRENT, gather_limited, run_to_completion
from nats_stream_source.connection.connection import Connection
from nats_stream_source.connection.settings import ConnectionSettings, split_list
from nats_stream_source.err_codes import ACK_PENDING_WITHOUT_ACKS, INACTIVE_THRESHOLD_EXCEEDS_LIMIT
from nats_stream_source.errors import (
    ApiError,
    ConsumerLimitError,
    ConsumerNotFoundError,
    InvalidNameError,
    JetStreamNotEnabledError,
    MessageNotFoundError,
    ProtocolError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.json_fields import (
    array,
    base64_bytes,
    decode_response,
    integer,
    object_,
    string,
    timestamp,
)
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.jetstream.subjects import api_prefix as api_prefix_of, is_literal
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.wire.consumer.deliveries import (
    Deliveries,
    Delivery,
    add_size_header,
    encode_deliveries,
)

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

_CONSUMER_LIMITS = {
    ACK_PENDING_WITHOUT_ACKS: "; set 'max_ack_pending' of the consumer to -1, otherwise it is that "
    "of the stream's consumer_limits",
    INACTIVE_THRESHOLD_EXCEEDS_LIMIT: "; lower 'inactive_threshold' of the consumer, or raise that "
    "of the stream's consumer_limits",
}

PAGE = 256
"""Streams of one response to ``STREAM.LIST`` (JSApiListLimit of nats-server)."""

_PAGE_OVERLAP = 100  # subjects that may be removed between two pages of a list


@contextlib.asynccontextmanager
async def connect(
    servers: str | Sequence[str],
    *,
    domain: str | None = None,
    api_prefix: str | None = None,
    **settings: Any,
) -> AsyncIterator[JetStream]:
    """Connect to NATS; the connection closes at the end of the ``async with``.

    Args:
        servers: one URL, ``nats://host:4222``, or several of one cluster: a sequence, or separated
            by commas.
        domain: JetStream domain; excludes ``api_prefix``.
        api_prefix: prefix of the JetStream API, as of an account's import (ADR-19).
        settings: the other fields of :class:`ConnectionSettings`: ``user``, ``password``,
            ``credentials``, ``tls_ca_file``, ``inbox_prefix``, ``request_timeout``, …

    Raises:
        ConfigurationError: a setting is invalid, or settings contradict each other.
        AuthorizationError: the server refused the credentials.
        ConnectError: no server accepted the connection within ``connect_timeout``.
    """
    of_connection = ConnectionSettings(
        servers=split_list(servers) if isinstance(servers, str) else tuple(servers),
        api_prefix=api_prefix_of(api_prefix, domain),
        **settings,
    )
    async with await Connection.open(of_connection) as connection:
        yield JetStream(connection)


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as ``STREAM.MSG.GET`` returns it; ``time`` as the server formats it."""

    subject: str
    seq: int
    time: str
    data: bytes
    headers: bytes


class JetStream:
    """JetStream API calls over one connection.

    All methods raise ``RequestTimeoutError``, ``PermissionDeniedError``,
    ``JetStreamNotEnabledError``, ``InvalidNameError`` for a name with whitespace and, for an error
    without its own class, ``ApiError`` with the server's codes.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def call(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request below the API prefix; returns the JSON object of the response."""
        full = f"{self.connection.settings.api_prefix}.{subject}"
        payload = json.dumps(request).encode() if request is not None else b""
        try:
            message = await self.connection.request(full, payload)
        except nats.errors.BadSubjectError as refused:
            raise InvalidNameError(f"invalid API subject {full!r}: it has whitespace") from refused
        response = decode_response(message.data, full)
        if error := object_(response, "error", default={}):
            raise api_error(subject, error)
        return response

    def fits(self, subject: str) -> bool:
        """Whether a server accepts a request on ``subject``, which is below the API prefix."""
        connection = self.connection
        return connection.control_line.fits(f"{connection.settings.api_prefix}.{subject}")

    async def stream_info(self, stream: str) -> StreamInfo:
        """State and configuration of a stream; StreamNotFoundError if it does not exist."""
        info = StreamInfo.parse(await self.call(f"STREAM.INFO.{stream}"))
        if info.name != stream:
            raise ProtocolError(
                f"invalid JetStream response: requested stream {stream!r}, received {info.name!r}"
            )
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
        2.11, older servers ignore it) replaces ``seq``. ``min_last_seq`` is for servers that
        support it, see ``leader``: others ignore or refuse the field
        (docs/internals/measurements.md, Servers 1).
        """
        for subject in (next_by_subj, last_by_subj):
            if subject is not None:
                self.connection.control_line.validate_name(subject)
        request = {"seq": seq, "start_time": start_time, "min_last_seq": min_last_seq}
        request |= {"next_by_subj": next_by_subj, "last_by_subj": last_by_subj}
        given = {name: value for name, value in request.items() if value is not None}
        try:
            response = await self.call(f"STREAM.MSG.GET.{stream}", given)
        except MessageNotFoundError:
            return None
        message = object_(response, "message")
        return StoredMessage(
            subject=string(message, "subject"),
            seq=integer(message, "seq"),
            time=timestamp(message, "time"),
            data=base64_bytes(message, "data"),
            headers=base64_bytes(message, "hdrs"),
        )

    async def last_seq(self, stream: str, filters: Sequence[str]) -> int:
        """The sequence of the leader's last message that matches a filter (none: all); or 0."""
        messages = await self.last_messages(stream, filters or (">",))
        return max((message.seq for message in messages), default=0)

    async def last_messages(
        self, stream: str, subjects: Sequence[str], limit: int = MAX_CONCURRENT
    ) -> list[StoredMessage]:
        """The leader's last message of each subject or filter that has one, in their order.

        Args:
            limit: the maximum number of concurrent requests.
        """

        async def last(subject: str) -> StoredMessage | None:
            return await self.message(stream, last_by_subj=subject)

        found = await gather_limited(last, subjects, limit)
        return [message for message in found if message is not None]

    async def api_level(self) -> int:
        """The API level of the server: 0 before 2.11, 1 from 2.11 on, higher for later versions."""
        return integer(await self.call("INFO"), "api", "level", default=0)

    async def subjects(
        self, stream: str, filter_subject: str, limit: int | None = None
    ) -> set[str]:
        """The subjects of the leader that have messages and match a filter.

        With ``limit`` it stops as soon as it has more than that number of subjects.
        """
        return set(await self.subject_counts(stream, filter_subject, limit))

    async def subject_counts(
        self, stream: str, filter_subject: str, limit: int | None = None
    ) -> dict[str, int]:
        """:meth:`subjects`, with the number of messages of each."""
        self.connection.control_line.validate_name(filter_subject)
        names: dict[str, int] = {}
        offset, last = 0, ""
        while True:
            request = {"subjects_filter": filter_subject, "offset": offset}
            response = await self.call(f"STREAM.INFO.{stream}", request)
            page = object_(response, "state", "subjects", default={})
            if offset and (not page or min(page) > last):
                # Subjects were removed, and the sorted list moved by more than the overlap of
                # pages.
                offset = max(0, offset - 10 * _PAGE_OVERLAP)
                continue
            names.update(page)
            if not page or offset + len(page) >= integer(response, "total", default=0):
                return names
            if limit is not None and len(names) > limit:
                return names
            # Pages have 100,000 subjects; subjects may be added and removed in between.
            last = max(page)
            offset += max(len(page) - _PAGE_OVERLAP, 1)

    async def add_consumer(self, stream: str, config: dict[str, Any]) -> dict[str, Any]:
        """Create the consumer ``config["name"]``; returns the server's consumer info.

        If a consumer of that name exists with another configuration, the server responds with an
        ApiError (10148, 10013 or 10105); with the same configuration, as if it had created it.

        A cancellation waits for the response before it is raised: servers create consumers
        asynchronously, so a deletion that is sent before the response does not find the consumer,
        which would exist afterwards.
        """
        subject = f"CONSUMER.CREATE.{stream}.{config['name']}"
        filter_subject = config.get("filter_subject")
        for name in (filter_subject, *config.get("filter_subjects", ())):
            if name:
                self.connection.control_line.validate_name(name)
        # Permissions may depend on the filter in the subject; servers do not require it there.
        if filter_subject and self.fits(f"{subject}.{filter_subject}"):
            subject += f".{filter_subject}"
        request = {"stream_name": stream, "config": config, "action": "create"}
        return await run_to_completion(self.call(subject, request))

    async def add_short_lived_consumer(self, stream: str, config: dict[str, Any]) -> dict[str, Any]:
        """:meth:`add_consumer`, with the ``inactive_threshold`` that the stream allows.

        Where ``consumer_limits`` of the stream has a shorter one, the consumer has that one, which
        the server sets for a consumer without the field. So a change of the limit under a running
        query does not need a request for the limit.
        """
        try:
            return await self.add_consumer(stream, config)
        except ApiError as error:
            if error.err_code != INACTIVE_THRESHOLD_EXCEEDS_LIMIT:
                raise
        allowed = {name: value for name, value in config.items() if name != "inactive_threshold"}
        return await self.add_consumer(stream, allowed)

    async def consumer_info(self, stream: str, name: str) -> dict[str, Any]:
        """The server's consumer info; ConsumerNotFoundError if the consumer does not exist."""
        return await self.call(f"CONSUMER.INFO.{stream}.{name}")

    async def stream_names_by_subject(self, subject: str) -> list[str]:
        """The names of the streams that have ``subject``, which may contain wildcards."""
        response = await self.call("STREAM.NAMES", {"subject": subject})
        return [str(name) for name in array(response, "streams")]

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Delete a consumer; ConsumerNotFoundError if it does not exist."""
        await self.call(f"CONSUMER.DELETE.{stream}.{name}")


def api_error(subject: str, error: dict[str, Any]) -> ApiError:
    """The exception for the ``error`` object of a response on ``subject``."""
    code, err_code = integer(error, "code", default=0), integer(error, "err_code", default=0)
    text = f"{subject}: {error.get('description')} (code {code}, err_code {err_code})"
    settings: tuple[str, ...] = ()
    if err_code == JetStreamNotEnabledError.err_code:
        text += "; set 'domain' or 'api_prefix' if JetStream is in another domain or account"
        settings = ("domain", "api_prefix")
    if err_code == ConsumerLimitError.err_code:
        text += (
            "; raise 'max_consumers' of the stream or account: each concurrent reader uses one "
            "consumer, beside the existing ones"
        )
    text += _CONSUMER_LIMITS.get(err_code, "")
    return _BY_CODE.get(err_code, ApiError)(text, code or None, err_code or None, settings=settings)


_MAX_PENDING_BYTES = 64 << 20  # of concurrent responses, if each has the maximum size


async def list_subjects(jetstream: JetStream, stream: str, filters: Sequence[str]) -> set[str]:
    """The subjects of the leader that match one of ``filters``; no filters: all subjects."""
    names: set[str] = set()
    for filter_subject in filters or (">",):
        names |= await jetstream.subjects(stream, filter_subject)
    return names


def max_concurrent_requests(jetstream: JetStream) -> int:
    """Maximum number of concurrent message requests, for messages of any size."""
    return max(
        1,
        min(MAX_CONCURRENT, _MAX_PENDING_BYTES // max(jetstream.connection.client.max_payload, 1)),
    )


async def missing_messages(
    jetstream: JetStream,
    stream: str,
    filters: Sequence[str],
    seen: Container[str],
    *,
    after: int | None = None,
    headers_only: bool = False,
) -> Deliveries:
    """The leader's messages of the subjects that a read of their last messages did not receive.

    A subject that is superseded before its delivery is delivered after the end of the read. One
    with wildcard tokens cannot be requested.

    Args:
        seen: the subjects that were received.
        after: return the first message after this sequence; by default the last one.
    """
    subjects = await list_subjects(jetstream, stream, filters)
    missing = sorted(name for name in subjects if is_literal(name) and name not in seen)

    async def request(subject: str) -> StoredMessage | None:
        if after is None:
            return await jetstream.message(stream, last_by_subj=subject)
        return await jetstream.message(stream, seq=after + 1, next_by_subj=subject)

    found = await gather_limited(request, missing)
    # None: removed since the subjects were listed.
    messages = [message for message in found if message is not None]
    return as_deliveries(stream, messages, headers_only=headers_only)


def as_deliveries(
    stream: str, messages: Iterable[StoredMessage], *, headers_only: bool = False
) -> Deliveries:
    """Stored messages, by sequence, as a consumer would deliver them."""

    def delivery(message: StoredMessage) -> Delivery:
        headers, payload = message.headers, message.data
        if headers_only:
            headers, payload = add_size_header(headers, len(payload)), b""
        return Delivery(message.subject, message.seq, nanoseconds(message.time), headers, payload)

    in_order = sorted(messages, key=lambda message: message.seq)
    return encode_deliveries(stream, [delivery(message) for message in in_order])


class StreamList:
    """Lists the streams of an account and their states, again and again.

    A server returns the list in pages, sorted by name. In a cluster it collects the states from the
    stream leaders; a stream without a leader is missing. A stream that is created or deleted
    between two pages moves the others, so one list may lack a stream that exists: what a list lacks
    must be confirmed by ``STREAM.INFO``.

    Attributes:
        requests: the number of requests of the last list.
    """

    def __init__(self) -> None:
        self.requests = 1
        self._last: dict[str, tuple[dict[str, Any], StreamInfo]] = {}

    async def request(self, jetstream: JetStream) -> dict[str, StreamInfo]:
        """The streams by name. One that is unchanged is the object of the last call.

        Raises:
            ProtocolError, RequestTimeoutError, PermissionDeniedError: as ``JetStream.call``.
        """
        found: dict[str, tuple[dict[str, Any], StreamInfo]] = {}
        offset = requests = 0
        while True:
            response = await jetstream.call("STREAM.LIST", {"offset": offset})
            requests += 1
            page = array(response, "streams")
            for stream in page:
                name = string(object_(stream, "config"), "name")
                found[name] = self._parsed(name, stream)
            offset += len(page)
            if not page or offset >= integer(response, "total", default=0):
                break
        self.requests, self._last = requests, found
        return {name: info for name, (_, info) in found.items()}

    def _parsed(self, name: str, stream: dict[str, Any]) -> tuple[dict[str, Any], StreamInfo]:
        # Parsing takes 35 µs a stream, comparing 2. The state of replicas always changes.
        comparable = {key: value for key, value in stream.items() if key != "ts"}
        last = self._last.get(name)
        if last is not None and last[0] == comparable:
            return last
        return comparable, StreamInfo.parse(stream)
