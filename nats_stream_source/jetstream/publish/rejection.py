"""Messages that a stream rejected, and rejections that pass by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from nats_stream_source.errors import ApiError
from nats_stream_source.wire.publish.frames import MessageColumns

_TRANSIENT = (
    10008,  # JetStream system temporarily unavailable
    10158,  # the first message with this id is not stored on a majority of replicas yet
    10163,  # the expected last sequence of the subject is temporarily unavailable
    10167,  # too many requests
)
_UNAVAILABLE = 503  # without an err_code: a replica that is not the leader any more


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
    if error.err_code in _TRANSIENT:
        return True
    return error.code == _UNAVAILABLE and not error.err_code
