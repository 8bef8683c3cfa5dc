"""Permission violations and refused subscriptions, joined to the requests that caused them.

The server reports a violation apart from the request: it names the subject and not the request.
Without this module a request on a denied subject would wait for its timeout.

Denied inboxes deny every response. nats-py subscribes to its inbox once, so a permission that is
added later has an effect on another connection only: a request a second later connects again.

A subscription beyond ``max_subscriptions`` is refused by an error that does not name it. The server
sends it before the PONG of a PING that follows the subscription. Without the PING the subscriber
receives nothing, as from a lost consumer: so it is until the first refusal, except where a
subscription that receives nothing would fail messages that are stored.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from time import monotonic
from typing import Any, TypeVar

from nats_stream_source.aio.tasks import wait_cancellable
from nats_stream_source.connection.control_line import ControlLine
from nats_stream_source.connection.nats_py.handshake import TOO_LONG
from nats_stream_source.connection.settings import PONG_TIMEOUT
from nats_stream_source.errors import NatsSourceError, PermissionDeniedError
from nats_stream_source.logs import field_logger

log = field_logger(__name__)
T = TypeVar("T")

_TOO_MANY = "maximum subscriptions exceeded"
_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.I)
_DENIED_PAUSE = 1.0  # seconds


def denied_error(subject: str) -> PermissionDeniedError:
    """The error for a subject that the server denied."""
    return PermissionDeniedError(
        f"the server denied the subject {subject!r}; add it to the user's permissions, or change "
        f"'inbox_prefix' or 'api_prefix'",
        settings=("inbox_prefix", "api_prefix"),
    )


class DeniedSubjects:
    """The denied subjects of one connection, and the requests that they end.

    Attributes:
        inboxes: the wildcard of the inboxes if the server denied them, else None.
        subscriptions: the number of subscriptions that the server refused.
    """

    def __init__(self, inbox_prefix: str, control_line: ControlLine) -> None:
        self._inbox_prefix = inbox_prefix
        self._control_line = control_line
        self.inboxes: str | None = None
        self._inboxes_since = 0.0
        self.subscriptions = 0
        self._running: dict[asyncio.Future[Any], str] = {}
        self._errors: dict[asyncio.Future[Any], NatsSourceError] = {}

    @property
    def outdated(self) -> bool:
        """Whether the inboxes were denied so long ago that they may be permitted now."""
        return self.inboxes is not None and monotonic() - self._inboxes_since > _DENIED_PAUSE

    def verify_inboxes(self) -> None:
        """Raise PermissionDeniedError if the server denied the inboxes of this connection."""
        if self.inboxes:
            raise denied_error(self.inboxes)

    def forget(self) -> None:
        """Forget what is denied: after a reconnect, nats-py subscribes to everything again."""
        self.inboxes, self.subscriptions = None, 0

    async def verify_subscription(
        self, subject: str, before: int, ping: Callable[[float], Awaitable[bool]]
    ) -> None:
        """Raise PermissionDeniedError if the server refused the last subscription.

        Args:
            before: :attr:`subscriptions` before it was sent.
            ping: returns once the server responds to a PING.
        """
        responds = await ping(PONG_TIMEOUT)
        self.verify_inboxes()
        if responds and self.subscriptions > before:
            raise PermissionDeniedError(
                f"could not subscribe to {subject!r}: the server reports {_TOO_MANY!r}; raise "
                f"max_subscriptions of the server or the user's limit"
            )

    async def run(self, subject: str, action: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``action``; raise PermissionDeniedError once ``subject`` or an inbox is denied."""
        attempt = asyncio.ensure_future(action())
        self._running[attempt] = subject
        try:
            return await wait_cancellable(None, attempt)
        except asyncio.CancelledError:
            if (error := self._errors.get(attempt)) is None:
                raise  # the caller cancelled it, not a denial
            raise error from None
        finally:
            del self._running[attempt]
            self._errors.pop(attempt, None)

    def _end(self, attempt: asyncio.Future[Any], error: NatsSourceError) -> None:
        self._errors[attempt] = error
        attempt.cancel()

    def add(self, text: str) -> tuple[str | None, PermissionDeniedError] | None:
        """Record the violation that ``text``, an error of the server, reports.

        Returns:
            The subject to which a message was denied, or None for the inboxes, and the error; None
            if ``text`` does not report such a violation.
        """
        lower = text.lower()
        if _TOO_MANY in lower:
            self.subscriptions += 1
            log.warning("the server refused a subscription", reason=_TOO_MANY)
        if TOO_LONG in lower:
            self._control_line.lower()
            for attempt, subject in self._running.items():
                if self._control_line.refused(subject):
                    self._end(attempt, self._control_line.error(subject))
        if (match := _VIOLATION.search(text)) is None:
            return None
        subscription, denied = match[1].lower() == "subscription", match[2]
        inbox = subscription and denied.startswith(self._inbox_prefix + ".")
        if inbox:
            self.inboxes, self._inboxes_since = f"{self._inbox_prefix}.>", monotonic()
        error = denied_error(self.inboxes if inbox and self.inboxes else denied)
        for attempt, subject in self._running.items():
            if inbox or subject == denied:
                self._end(attempt, error)
        if subscription and not inbox:
            return None
        return (None if inbox else denied), error
