"""The hierarchy of named errors.

Every failure that a user can get has a class here. If NATS has numbers for the failure, the class
has them too: ``code`` is the HTTP-like status, ``err_code`` JetStream's error code. The text of an
error has the form *operation failed: observed, expected; action*, and never contains a secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

Number: TypeAlias = "int | None"
Settings: TypeAlias = "Sequence[str] | None"


class NatsSourceError(Exception):
    """The base class of all errors that this package raises.

    Attributes:
        code, err_code: NATS's numbers for the failure, or None.
        settings: names of the ``ConnectionSettings`` fields and API arguments that the caller can
            change. ``options.table`` appends the names of the options or flags to the text.
    """

    code: int | None = None
    err_code: int | None = None
    settings: tuple[str, ...] = ()

    def __init__(
        self, message: str, code: Number = None, err_code: Number = None, settings: Settings = None
    ) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        if err_code is not None:
            self.err_code = err_code
        if settings is not None:
            self.settings = tuple(settings)


class ConfigurationError(NatsSourceError, ValueError):
    """A setting or argument is invalid; raised before anything is read or written."""


class OptionError(ConfigurationError):
    """An option is unknown, of the wrong type, out of range, missing or contradicts another."""


class MissingPackageError(ConfigurationError, ImportError):
    """A package of an extra is not installed; the text names the extra to install."""


class WorkerPythonError(ConfigurationError):
    """Spark's Python workers cannot run the formats; the text names the setting to change."""


class InvalidNameError(ConfigurationError):
    """The name of a bucket, key, stream or filter is invalid (ADR-8)."""


class NameTooLongError(InvalidNameError):
    """A name is longer than a server accepts in one line (``max_control_line``)."""


class KeyNotEncodableError(InvalidNameError):
    """The key codec would store the key as one that decodes to another key, or not at all."""


class UnsupportedStreamError(ConfigurationError):
    """The stream's retention (work queue, interest) does not allow reads of ranges."""


class ServerTooOldError(ConfigurationError):
    """The server lacks a requested feature; the text names the version that has it."""


class OffsetError(NatsSourceError):
    """A checkpoint's offset cannot be used: unreadable, newer, or of another bucket or filter."""


class ProtocolError(NatsSourceError):
    """The server sent bytes or a response that violate the NATS protocol."""


class UndecodableError(NatsSourceError):
    """A stored key or value is not what the bucket's codec encodes."""


class ConnectError(NatsSourceError):
    """The client could not connect within ``connect_timeout``, or its connection is closed.

    ``waited`` has the seconds for which the client tried to restore a lost connection.
    """

    waited = 0.0


class AuthorizationError(ConnectError):
    """The server refused the credentials."""


class TlsError(ConnectError):
    """The TLS handshake failed, or the server does not offer TLS."""


class PermissionDeniedError(NatsSourceError):
    """The server denied a subject that the operation publishes or subscribes to."""


class RequestTimeoutError(NatsSourceError):
    """The server did not respond within ``request_timeout``."""

    code = 408
    settings = ("request_timeout",)


class ApiError(NatsSourceError):
    """JetStream responded with an error that does not have its own class."""


class JetStreamNotEnabledError(ApiError):
    """JetStream is not enabled for the server or account, or the domain or prefix is wrong."""

    code, err_code = 503, 10039


class StreamNotFoundError(ApiError):
    """The stream (for a bucket: ``KV_<bucket>``) does not exist."""

    code, err_code = 404, 10059


class BucketNotFoundError(StreamNotFoundError):
    """The bucket does not exist."""


class BucketExistsError(ApiError):
    """A bucket of this name exists with another configuration."""

    code, err_code = 400, 10058


class ConsumerNotFoundError(ApiError):
    """The consumer does not exist."""

    code, err_code = 404, 10014


class ConsumerLimitError(ApiError):
    """The stream, the account or the server has reached its maximum number of consumers."""

    code, err_code = 400, 10026


class MessageNotFoundError(ApiError):
    """No message matches the request."""

    code, err_code = 404, 10037


class BadRequestError(ApiError):
    """An invalid Direct Get request: empty, or with fields that exclude each other."""

    code = 408


class TooManySubjectsError(ApiError):
    """More than 1,024 subjects match one request for the last message of each."""

    code = 413


class KeyNotFoundError(MessageNotFoundError):
    """The bucket does not have the key, or not that revision of it."""


class KeyDeletedError(KeyNotFoundError):
    """The key's last entry is a marker: the key was deleted or purged, or its TTL expired.

    ``revision`` is the marker's, ``operation`` is ``DEL`` or ``PURGE``.
    """

    def __init__(
        self, message: str, revision: int, operation: str, *, settings: Settings = None
    ) -> None:
        super().__init__(message, settings=settings)
        self.revision = revision
        self.operation = operation


class ObjectNotFoundError(MessageNotFoundError):
    """The object store does not have the object, or it was deleted."""


class ObjectDamagedError(NatsSourceError):
    """An object's chunks differ from its meta message in number, size or digest."""


class BadObjectInfoError(ProtocolError):
    """A meta message of an object store cannot be read."""


class ObjectIsLinkError(ConfigurationError):
    """The object is a link to another object or store, and does not have data itself."""


class PublishError(ApiError):
    """A message was not stored, or the outcome is unknown."""


class WrongLastSequenceError(PublishError):
    """The subject's last message is not the one that the write expected.

    ``last_seq`` is its sequence if the server reports it (``wrong last sequence: 5``), else None.
    """

    code, err_code = 400, 10071

    def __init__(
        self, message: str, code: Number = None, err_code: Number = None, last_seq: Number = None
    ) -> None:
        super().__init__(message, code, err_code)
        self.last_seq = last_seq


class KeyExistsError(WrongLastSequenceError):
    """The key to create has a value; ``last_seq`` is its revision."""


class MessageTooLargeError(PublishError):
    """A message exceeds the server's ``max_payload`` or the bucket's ``max_value_size``."""

    code, err_code = 400, 10054


class StreamFullError(PublishError):
    """The stream refuses new messages: it is at its limits, or the storage is used up.

    The limits are ``max_bytes`` and ``max_msgs``. The storage is that of the account (err_code
    10002) or of the server (10023).
    """

    code, err_code = 503, 10077


class TtlNotSupportedError(PublishError, ConfigurationError):
    """The stream does not allow a TTL per message, or its server is older than 2.11."""

    code, err_code = 400, 10166


class FastIngestNotSupportedError(PublishError, ConfigurationError):
    """The stream does not accept fast ingest (``allow_batched``, nats-server 2.14)."""

    code, err_code = 400, 10205


class NoStreamError(PublishError):
    """No stream has the subject."""

    code = 503


class UnexpectedStreamError(PublishError):
    """Another stream than the expected one has stored the message; the text names both."""


class AckLostError(PublishError):
    """The connection was lost before the PubAck was received: the message may be stored or not.

    A second write is safe with the same ``msg_id`` (within the stream's duplicate window), or with
    an expected last sequence.
    """


class AckTimeoutError(PublishError, RequestTimeoutError):
    """No PubAck within ``request_timeout``: the message may be stored or not."""

    code = 408


class MinLastSequenceError(NatsSourceError):
    """The responding server has not reached the minimum last sequence of the read (ADR-53)."""

    code, err_code = 412, 10180


class ConsumerLostError(NatsSourceError):
    """An ordered consumer reached its maximum number of rebuilds without progress."""


class SubscribeError(ConfigurationError):
    """The requested subscription is invalid, or does not fit the existing consumer (ADR-15)."""


class NoMatchingStreamError(SubscribeError):
    """Not exactly one stream has the subject, so the stream must be named."""


class ConsumerModeError(SubscribeError):
    """A pull subscription to a push consumer, or a push subscription to a pull consumer."""


class DeliverGroupError(SubscribeError):
    """The consumer's deliver group differs from the requested queue group."""


class DuplicateSubscriptionError(SubscribeError):
    """The push consumer already has a subscriber."""


class SubjectMismatchError(SubscribeError):
    """The existing consumer has other filter subjects."""


class ConsumerDiffersError(SubscribeError):
    """The existing consumer has another configuration, which subscribing does not change."""


class QueueStatusError(SubscribeError):
    """Heartbeats or flow control in a queue group, where they would reach random members."""


class SubscriptionError(NatsSourceError):
    """An error of a running subscription (ADR-15) that does not have its own class."""


class SubscriptionClosedError(SubscriptionError):
    """The subscription or its connection is closed: it does not deliver any more messages."""


class NextTimeoutError(SubscriptionError, TimeoutError):
    """No message was received within the caller's timeout."""


class MissedHeartbeatError(SubscriptionError):
    """Nothing was received for three heartbeat intervals: the consumer may be lost."""


class SingleResponseError(SubscriptionError):
    """An account import passes only the first responses to a pull request."""


class ConsumerGapError(SubscriptionError):
    """The consumer sequence has a gap: delivered messages were not received."""


class SlowConsumerError(SubscriptionError):
    """The buffer of received messages reached its limit; later messages were dropped."""


class FlowControlLostError(SubscriptionError):
    """The server repeatedly reports a stalled consumer after the flow-control reply was sent."""


class AckError(SubscriptionError):
    """An acknowledgement could not be published, or was not confirmed."""


class StatusError(SubscriptionError):
    """The server sent a status that is an error (ADR-15), with ``code`` and ``description``."""

    def __init__(
        self, message: str, code: Number = None, description: str = "", *, settings: Settings = None
    ) -> None:
        super().__init__(message, code, settings=settings)
        self.description = description


class ConflictStatusError(StatusError):
    """409: the request contradicts the consumer's configuration or limits."""

    code = 409


class ConsumerDeletedError(ConflictStatusError):
    """The consumer was deleted during the subscription."""


class LeadershipChangedError(ConflictStatusError):
    """The consumer leader changed: the pull request is void; send it again."""


class NoRespondersStatusError(StatusError):
    """503: the request's subject has no responders, as after the consumer was deleted."""

    code = 503


class UnknownStatusError(StatusError):
    """A status that is not in ADR-15."""


class DataLossError(NatsSourceError):
    """Messages were removed before they were read."""


class TableError(NatsSourceError):
    """A Delta table could not be read or written; the text has its cause."""


class TableConflictError(TableError):
    """Other writers changed the Delta table during each attempt to commit; merge again later."""


_PACKAGES = {
    "spark": ("pyspark", "py4j"),
    "metrics": ("prometheus_client", "opentelemetry"),
    "follow": ("deltalake", "obstore", "pyroaring", "tenacity"),
    "delta": ("delta", "deltalake", "tenacity", "pyspark", "py4j"),
}


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Raise MissingPackageError if an import in the block fails for a package of the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES[extra]:
            raise
        raise MissingPackageError(
            f"could not import {package!r}: the package is not installed; run "
            f"`pip install 'nats-stream-source[{extra}]'`"
        ) from error
