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


class OffsetError(NatsSourceError):
    """A checkpoint's offset cannot be used: unreadable, newer, or of another bucket or filter."""


class ProtocolError(NatsSourceError):
    """The server sent bytes that the NATS protocol does not have."""


class ConnectError(NatsSourceError):
    """No connection could be made within ``connectTimeout``, or it was lost for good."""


class AuthorizationError(ConnectError):
    """The server refused the credentials."""


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


class ConsumerNotFoundError(ApiError):
    """The consumer does not exist."""

    code = 404
    err_code = 10014


class MessageNotFoundError(ApiError):
    """No message matches the request."""

    code = 404
    err_code = 10037


class MinLastSequenceError(NatsSourceError):
    """What answered has not reached the sequence that the read must see (ADR-53)."""

    code = 412
    err_code = 10180


class ConsumerLostError(NatsSourceError):
    """An ordered consumer was rebuilt as often as allowed without getting any further."""


class DataLossError(NatsSourceError):
    """Entries that the query has not read yet are gone; ``failOnDataLoss=false`` accepts it."""
