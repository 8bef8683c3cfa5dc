"""What a stream answers to a message: the PubAck, or why it refuses. Pure.

And the names of the headers by which a publisher tells the stream what it expects of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import (
    MessageTooLargeError,
    ProtocolError,
    PublishError,
    StreamFullError,
    TtlNotSupportedError,
    WrongLastSequenceError,
)

MSG_ID = "Nats-Msg-Id"
EXPECTED_STREAM = "Nats-Expected-Stream"
EXPECTED_LAST_SEQUENCE = "Nats-Expected-Last-Sequence"
EXPECTED_LAST_SUBJECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_MSG_ID = "Nats-Expected-Last-Msg-Id"
ROLLUP = "Nats-Rollup"
TTL = "Nats-TTL"

_REFUSALS: dict[int, type[PublishError]] = {
    10054: MessageTooLargeError,
    10077: StreamFullError,
    10166: TtlNotSupportedError,
}
# The second has its text without a number (servers that answer from before the proposal).
_WRONG_LAST_SEQUENCE = (10071, 10164)
_LAST_SEQUENCE = re.compile(r"wrong last sequence: (\d+)")


@dataclass(frozen=True, slots=True)
class PubAck:
    """The server has stored a message.

    Attributes:
        stream: that has it.
        seq: its stream sequence; in a bucket the revision.
        duplicate: a message with this ``Nats-Msg-Id`` was there already; ``seq`` is that one's.
        domain: of the stream, None where there is none.
    """

    stream: str
    seq: int
    duplicate: bool = False
    domain: str | None = None

    @classmethod
    def parse(cls, subject: str, payload: bytes) -> PubAck:
        """From the server's answer to a message on ``subject``.

        Raises:
            PublishError and its subclasses: the server refused the message.
            ProtocolError: the answer is none.
        """
        try:
            answer = json.loads(payload)
            if (error := answer.get("error")) is None:
                return cls(
                    answer["stream"],
                    int(answer["seq"]),
                    bool(answer.get("duplicate", False)),
                    answer.get("domain") or None,
                )
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ProtocolError(f"the answer to a message on {subject!r} is no PubAck") from None
        raise _refusal(subject, error)


def _refusal(subject: str, error: Mapping[str, Any]) -> PublishError:
    code, err_code = error.get("code"), error.get("err_code") or 0
    description = str(error.get("description"))
    text = f"{subject}: {description} (code {code}, err_code {err_code})"
    if err_code in _WRONG_LAST_SEQUENCE:
        found = _LAST_SEQUENCE.search(description)
        last_seq = int(found[1]) if found else None
        return WrongLastSequenceError(text, code, err_code, last_seq)
    return _REFUSALS.get(err_code, PublishError)(text, code, err_code)
