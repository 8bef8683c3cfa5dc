"""Permission violations and refused subscriptions, joined to the requests that caused them.

The server reports a violation apart from the request: it names the subject, in lower case where
nats-py passes it on, and not the request. Without this module a request on a denied subject would
wait for its timeout.

A subscription beyond ``max_subscriptions`` is refused by an error that does not name it. The first
subscriber receives nothing, as from a lost consumer. From then on each subscription is followed by
a PING: the server sends the error before the PONG.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from nats_stream_source.aio.tasks import wait_cancellable
from nats_stream_source.connection.control_line import ControlLine
from nats_stream_source.connection.nats_py.client_patches import TOO_LONG
from nats_stream_source.errors import NatsSourceError, PermissionDeniedError
from nats_stream_source.logs import field_logger

log = field_logger(__name__)
T = TypeVar("T")

_TOO_MANY = "maximum subscriptions exceeded"
_PONG_TIMEOUT = 5.0  # seconds; without a PONG, the subscriber reports that nothing arrives
_VIOLATION = re.compile(r'permissions violation for (?:publish|subscription) to "([^"]+)"')


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
        inboxes: the wildcard of the inboxes if the server denied them, else None. nats-py
            subscribes to its inbox once, so that later requests would wait without a reply too.
        subscriptions: the number of subscriptions that the server refused.
    """

    def __init__(self, inbox_prefix: str, control_line: ControlLine) -> None:
        self._inbox_prefix = inbox_prefix
        self._control_line = control_line
        self.inboxes: str | None = None
        self.subscriptions = 0
        self._running: dict[asyncio.Future[Any], str] = {}
        self._errors: dict[asyncio.Future[Any], NatsSourceError] = {}

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
        if before and await ping(_PONG_TIMEOUT) and self.subscriptions > before:
            raise PermissionDeniedError(
                f"could not subscribe to {subject!r}: the server reports {_TOO_MANY!r}; raise "
                f"max_subscriptions of the server or the user's limit"
            )

    async def run(self, subject: str, action: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``action``; raise PermissionDeniedError once ``subject`` or an inbox is denied."""
        self.verify_inboxes()
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
        """Record the violation that ``text``, an error of the server in lower case, reports.

        Returns:
            The denied subject in lower case, or None for the inboxes, and the error; None if
            ``text`` does not report a violation.
        """
        if _TOO_MANY in text:
            self.subscriptions += 1
            log.warning("the server refused a subscription", reason=_TOO_MANY)
        if TOO_LONG in text:
            self._control_line.lower()
            for attempt, subject in self._running.items():
                if self._control_line.refused(subject):
                    self._end(attempt, self._control_line.error(subject))
        if (match := _VIOLATION.search(text)) is None:
            return None
        denied = match[1]
        inbox = denied.startswith(self._inbox_prefix.lower() + ".")
        if inbox:
            self.inboxes = f"{self._inbox_prefix}.>"
        for attempt, subject in self._running.items():
            # Permissions are case-sensitive; only nats-py's text is in lower case.
            if inbox or subject.lower() == denied:
                self._end(attempt, denied_error(self.inboxes or subject))
        return (None if inbox else denied), denied_error(self.inboxes or denied)
