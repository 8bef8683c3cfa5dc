"""Messages that a stream rejected, and rejections that pass by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from nats_stream_source.err_codes import TRANSIENT_REJECTIONS, UNAVAILABLE
from nats_stream_source.errors import ApiError
from nats_stream_source.wire.publish.frames import MessageColumns


@dataclass(frozen=True, slots=True)
class Rejection:
    """A message that the stream rejected.

    Attributes:
        row: its number, from 0, among all messages of the publisher.
        message: the message, as columns of one element.
        error: the reason.
        acknowledged: whether it had a PubAck before, and was sent again because an earlier message
            did not have one.
    """

    row: int
    message: MessageColumns
    error: ApiError
    acknowledged: bool = False

    @property
    def subject(self) -> str:
        """The message's subject."""
        return self.message.subject(0)


def raise_rejection(rejection: Rejection) -> None:
    """Raise the error of a rejection."""
    raise rejection.error


def is_transient_rejection(error: ApiError) -> bool:
    """Whether the stream may store the message when it is sent again."""
    if error.err_code in TRANSIENT_REJECTIONS:
        return True
    # Without an err_code: a replica that is not the leader any more.
    return error.code == UNAVAILABLE and not error.err_code
