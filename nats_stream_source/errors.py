"""One tree of named errors.

Every failure that a user can meet has a class here. Where NATS numbers the failure, the class
carries the numbers: ``code`` is the HTTP-like status, ``err_code`` JetStream's own. The text of an
error says what happened and which option or setting changes it, and never holds a secret.
"""

from __future__ import annotations

from typing import ClassVar


class NatsSourceError(Exception):
    """The root of all errors that this package raises.

    ``code`` and ``err_code`` are NATS's numbers for the failure, or None where it has none.
    """

    code: ClassVar[int | None] = None
    err_code: ClassVar[int | None] = None


class ConfigurationError(NatsSourceError, ValueError):
    """What was asked for cannot be: found before anything is read or written."""


class OptionError(ConfigurationError):
    """An option is unknown, of the wrong type, out of range, missing or contradicts another."""


class InvalidNameError(ConfigurationError):
    """A bucket, key or filter breaks ADR-8's rules for names."""


class UnsupportedStreamError(ConfigurationError):
    """The stream exists, but cannot be read in ranges (a work queue, an interest stream)."""


class ServerTooOldError(ConfigurationError):
    """The server is older than what was asked for; the text names the version that has it."""


class OffsetError(NatsSourceError):
    """A checkpoint's offset cannot be used: unreadable, newer, or of another bucket or filter."""


class ProtocolError(NatsSourceError):
    """The server sent bytes that the NATS protocol does not have."""


class ConnectError(NatsSourceError):
    """No connection could be made within ``connectTimeout``, or it was lost for good."""


class AuthorizationError(ConnectError):
    """The server refused the credentials."""


class TlsError(ConnectError):
    """Server and client do not trust each other, or the server does not encrypt."""


class PermissionDeniedError(NatsSourceError):
    """The user may not publish or subscribe to a subject that the read needs."""


class RequestTimeoutError(NatsSourceError):
    """The server did not answer within ``requestTimeout``."""

    code = 408


class ApiError(NatsSourceError):
    """JetStream answered a request with an error that has no class of its own."""

    def __init__(self, message: str, code: int | None = None, err_code: int | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code  # type: ignore[misc]
        if err_code is not None:
            self.err_code = err_code  # type: ignore[misc]


class JetStreamNotEnabledError(ApiError):
    """The server or account has no JetStream, or the domain or prefix leads to none."""

    code = 503
    err_code = 10039


class StreamNotFoundError(ApiError):
    """The stream (for a bucket: ``KV_<bucket>``) does not exist."""

    code = 404
    err_code = 10059


class BucketNotFoundError(StreamNotFoundError):
    """The bucket does not exist."""


class BucketExistsError(ApiError):
    """A bucket of this name exists with other properties."""

    code = 400
    err_code = 10058


class ConsumerNotFoundError(ApiError):
    """The consumer does not exist."""

    code = 404
    err_code = 10014


class ConsumerLimitError(ApiError):
    """The stream, the account or the server allows no more consumers than there are."""

    code = 400
    err_code = 10026


class MessageNotFoundError(ApiError):
    """No message matches the request."""

    code = 404
    err_code = 10037


class BadRequestError(ApiError):
    """A Direct Get that cannot be: nothing asked for, or two things that exclude each other."""

    code = 408


class TooManySubjectsError(ApiError):
    """More than 1,024 subjects match one request for the last message of each."""

    code = 413


class KeyNotFoundError(MessageNotFoundError):
    """The bucket has no such key, or no such revision of it."""


class KeyDeletedError(KeyNotFoundError):
    """The key's last entry is a marker: it was deleted, purged, or its TTL was over.

    ``revision`` is the marker's, ``operation`` is ``DEL`` or ``PURGE``.
    """

    def __init__(self, message: str, revision: int, operation: str) -> None:
        super().__init__(message)
        self.revision = revision
        self.operation = operation


class ObjectNotFoundError(MessageNotFoundError):
    """The object store has no such object, or it was deleted."""


class ObjectDamagedError(NatsSourceError):
    """An object's chunks are not what its meta message says: their number, size or digest."""


class BadObjectInfoError(ProtocolError):
    """A meta message of an object store cannot be read."""


class ObjectIsLinkError(ConfigurationError):
    """What was asked for is a link to an object, or to a whole store, and has no data itself."""


class PublishError(ApiError):
    """A message was not stored, or nobody knows whether it was."""


class WrongLastSequenceError(PublishError):
    """The subject's last message is not the one that the write expected.

    ``last_seq`` is its sequence where the server says it (``wrong last sequence: 5``), else None.
    """

    code = 400
    err_code = 10071

    def __init__(
        self,
        message: str,
        code: int | None = None,
        err_code: int | None = None,
        last_seq: int | None = None,
    ) -> None:
        super().__init__(message, code, err_code)
        self.last_seq = last_seq


class KeyExistsError(WrongLastSequenceError):
    """A key that was to be created has a value; ``last_seq`` is its revision."""


class MessageTooLargeError(PublishError):
    """A message exceeds the server's ``max_payload`` or the bucket's ``max_value_size``."""

    code = 400
    err_code = 10054


class StreamFullError(PublishError):
    """The stream has reached ``max_bytes`` or ``max_msgs`` and refuses new messages."""

    code = 503
    err_code = 10077


class TtlNotSupportedError(PublishError, ConfigurationError):
    """The stream allows no TTL on a single message, or its server is older than 2.11."""

    code = 400
    err_code = 10166


class NoStreamError(PublishError):
    """No stream takes messages on the subject."""

    code = 503


class AckLostError(PublishError):
    """The connection was lost before the PubAck came: the message may be stored or not.

    Writing it again is safe with the same ``msg_id`` (within the stream's duplicate window), or
    where an expected last sequence guards it.
    """


class AckTimeoutError(PublishError, RequestTimeoutError):
    """The PubAck did not come within ``requestTimeout``: the message may be stored or not."""

    code = 408


class MinLastSequenceError(NatsSourceError):
    """What answered has not reached the sequence that the read must see (ADR-53)."""

    code = 412
    err_code = 10180


class ConsumerLostError(NatsSourceError):
    """An ordered consumer was rebuilt as often as allowed without getting any further."""


class SubscribeError(ConfigurationError):
    """A subscription was asked for that cannot be, or not with the consumer there is (ADR-15)."""


class NoMatchingStreamError(SubscribeError):
    """Not exactly one stream takes the subject, so it must be named."""


class ConsumerModeError(SubscribeError):
    """A pull subscription was asked for on a push consumer, or the other way round."""


class DeliverGroupError(SubscribeError):
    """The consumer's deliver group is not the queue group that was asked for."""


class DuplicateSubscriptionError(SubscribeError):
    """Somebody else subscribes to the push consumer already."""


class SubjectMismatchError(SubscribeError):
    """The consumer that exists has other filter subjects."""


class ConsumerDiffersError(SubscribeError):
    """The consumer that exists has another configuration, and it is not changed by subscribing."""


class QueueStatusError(SubscribeError):
    """Heartbeats or flow control in a queue group: they would go to random members."""


class SubscriptionError(NatsSourceError):
    """What happens to a subscription while it runs (ADR-15); without a class of its own."""


class SubscriptionClosedError(SubscriptionError):
    """The subscription was ended, or the connection closed: no message comes any more."""


class NextTimeoutError(SubscriptionError, TimeoutError):
    """No message came within the time that the caller gave."""


class MissedHeartbeatError(SubscriptionError):
    """Nothing came for three heartbeat intervals: the server or the consumer may be gone."""


class ConsumerGapError(SubscriptionError):
    """The consumer sequence jumped: messages were sent that did not arrive."""


class SlowConsumerError(SubscriptionError):
    """More bytes waited for the caller than may; what came then was dropped."""


class FlowControlLostError(SubscriptionError):
    """The server says again and again that it waits for a flow-control answer that was given."""


class AckError(SubscriptionError):
    """An acknowledgement could not be published, or was not confirmed."""


class StatusError(SubscriptionError):
    """The server sent a status that is an error (ADR-15).

    ``code`` and ``description`` are those of its status line.
    """

    def __init__(self, message: str, code: int | None = None, description: str = "") -> None:
        super().__init__(message)
        if code is not None:
            self.code = code  # type: ignore[misc]
        self.description = description


class ConflictStatusError(StatusError):
    """409: what was asked for contradicts the consumer's configuration or limits."""

    code = 409


class ConsumerDeletedError(ConflictStatusError):
    """The consumer was deleted while it was subscribed to."""


class LeadershipChangedError(ConflictStatusError):
    """The consumer has another leader now, or none: the pull request is void, ask again."""


class NoRespondersStatusError(StatusError):
    """503: nobody listens where a request went, as when the consumer is gone."""

    code = 503


class UnknownStatusError(StatusError):
    """A status that ADR-15 does not know."""


class DataLossError(NatsSourceError):
    """Entries that the query has not read yet are gone; ``failOnDataLoss=false`` accepts it."""
