"""PubAcks: the response of a stream to a message, or the error with which it rejects it. Pure.

The constants are the names of the headers that a stream processes when it stores a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats_stream_source.err_codes import (
    STORAGE_USED_UP,
    TRANSIENT_REJECTIONS,
    UNAVAILABLE,
    WRONG_LAST_SEQUENCE_OF_OLD_SERVERS,
)
from nats_stream_source.errors import (
    AckLostError,
    ApiError,
    ConfigurationError,
    MessageTooLargeError,
    NoStreamError,
    ProtocolError,
    PublishError,
    StreamFullError,
    TtlNotSupportedError,
    UnexpectedStreamError,
    WrongLastSequenceError,
)

MSG_ID = "Nats-Msg-Id"
EXPECTED_LAST_SUBJECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
ROLLUP = "Nats-Rollup"
TTL = "Nats-TTL"

_ERRORS_BY_CODE: dict[int | None, type[PublishError]] = {
    **dict.fromkeys(STORAGE_USED_UP, StreamFullError),
    **{
        error.err_code: error
        for error in (MessageTooLargeError, StreamFullError, TtlNotSupportedError)
    },
}
_WRONG_LAST_SEQUENCE = (WrongLastSequenceError.err_code, WRONG_LAST_SEQUENCE_OF_OLD_SERVERS)
_LAST_SEQUENCE = re.compile(r"wrong last sequence: (\d+)")


@dataclass(frozen=True, slots=True)
class PubAck:
    """The stream has stored a message.

    Attributes:
        stream: the stream's name.
        seq: the message's stream sequence; in a bucket the revision.
        duplicate: the stream already had a message with this ``Nats-Msg-Id``; ``seq`` is that
            message's sequence.
        domain: the stream's JetStream domain; None without one.
    """

    stream: str
    seq: int
    duplicate: bool = False
    domain: str | None = None

    @classmethod
    def parse(cls, subject: str, payload: bytes) -> PubAck:
        """Parse the server's response to a message on ``subject``.

        Raises:
            PublishError and its subclasses: the stream rejected the message.
            ProtocolError: the response is not a PubAck.
        """
        try:
            response = json.loads(payload)
            if (error := response.get("error")) is None:
                return cls(
                    response["stream"],
                    int(response["seq"]),
                    bool(response.get("duplicate", False)),
                    response.get("domain") or None,
                )
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ProtocolError(
                f"invalid PubAck for a message on {subject!r}: expected a JSON object with "
                f"'stream' and an integer 'seq'"
            ) from None
        raise publish_error(subject, error)


def publish_error(subject: str, error: Mapping[str, Any]) -> PublishError:
    """The error for a message on ``subject``, from the ``error`` object of the response."""
    code, err_code = error.get("code"), error.get("err_code") or 0
    description = str(error.get("description"))
    message = f"could not publish to {subject!r}: {description} (code {code}, err_code {err_code})"
    if err_code in _WRONG_LAST_SEQUENCE:
        match = _LAST_SEQUENCE.search(description)
        last_seq = int(match[1]) if match else None
        return WrongLastSequenceError(message, code, err_code, last_seq)
    return _ERRORS_BY_CODE.get(err_code, PublishError)(message, code, err_code)


def too_large_error(subject: str, size: int, limit: int) -> MessageTooLargeError:
    """The error for a message on ``subject`` that exceeds the server's ``max_payload``."""
    return MessageTooLargeError(
        f"could not publish to {subject!r}: the message has {size} bytes, more than the server's "
        f"max_payload of {limit}"
    )


def lost_error(subject: str, reason: str) -> AckLostError:
    """The error for a message in flight whose PubAck cannot arrive any more."""
    return AckLostError(
        f"could not confirm a message on {subject!r}: {reason}; the message may or may not be "
        f"stored"
    )


def no_ack_error(target: str) -> ConfigurationError:
    """The error for a write to a stream that stores messages without PubAcks; none was sent."""
    return ConfigurationError(
        f"could not write to {target}: its stream has no_ack, expected PubAcks, which confirm that "
        f"a message is stored; update the stream with no_ack=false, or write to another one"
    )


def unexpected_stream_error(expected: str, found: str, subject: str) -> UnexpectedStreamError:
    """The error for a message on ``subject`` that another stream has stored."""
    return UnexpectedStreamError(
        f"could not publish to stream {expected!r}: stream {found!r} has stored the message on "
        f"{subject!r}; publish to a subject of {expected!r}"
    )


def no_stream_error(subject: str) -> NoStreamError:
    """The error for a message on ``subject`` that has no responders (status 503)."""
    return NoStreamError(
        f"could not publish to {subject!r}: no stream receives the subject (code 503); create the "
        f"stream, or set 'domain' or 'api_prefix' to the domain or account that has it",
        settings=("domain", "api_prefix"),
    )


def is_transient_rejection(error: ApiError) -> bool:
    """Whether the stream may store the message when it is sent again."""
    if error.err_code in TRANSIENT_REJECTIONS:
        return True
    # Without an err_code: a replica that is not the leader any more.
    return error.code == UNAVAILABLE and not error.err_code
