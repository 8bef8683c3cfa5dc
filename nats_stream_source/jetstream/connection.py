"""A connection to NATS: how to make one, whether it lives, and requests that fail with a reason.

nats-py does the work. What this module adds: one deadline for the whole of connecting, errors that
name the option to change, permission violations (which the server reports apart from the request)
joined to the request that met them, and a liveness check that is a PING/PONG and not a flag.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from nats_stream_source.errors import (
    AuthorizationError,
    ConfigurationError,
    ConnectError,
    JetStreamNotEnabledError,
    PermissionDeniedError,
    RequestTimeoutError,
)
from nats_stream_source.jetstream.bridge import Inbox, abort, open_inbox, tapped_client
from nats_stream_source.jetstream.subjects import DEFAULT_API_PREFIX

T = TypeVar("T")

log = logging.getLogger(__name__)

_CLOSE_DEADLINE = 2.0  # seconds
_RECONNECT_WAIT = 0.1  # seconds between two attempts at the same server
_DENIED = re.compile(r'permissions violation for (?:publish|subscription) to "([^"]+)"')


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Where the servers are and who asks. Hashable; secrets stay out of the ``repr``.

    Attributes:
        servers: URLs, ``nats://host:port``; a URL may carry ``user:password@``.
        api_prefix: of all JetStream API subjects (ADR-19), see ``subjects.api_prefix``.
        inbox_prefix: of the subjects that this client subscribes to.
        consumer_prefix: of the names of the consumers that it creates.
        connect_timeout, request_timeout: seconds.
    """

    servers: tuple[str, ...] = field(repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    api_prefix: str = DEFAULT_API_PREFIX
    inbox_prefix: str = "_INBOX"
    consumer_prefix: str = "spark"
    connect_timeout: float = 10.0
    request_timeout: float = 5.0

    @property
    def places(self) -> str:
        """The servers without user, password or token, for messages."""
        return ", ".join(_place(url) for url in self.servers)


def _check_servers(settings: ConnectionSettings) -> None:
    schemes = set()
    for url in settings.servers:
        try:
            parts = urlsplit(url if "://" in url else f"nats://{url}")
            sound = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            sound = False
        if not sound or parts.scheme not in ("nats", "tls", "ws", "wss"):
            raise ConfigurationError(
                f"option 'servers': {_place(url)!r} is not an address like nats://host:4222"
            )
        schemes.add(parts.scheme in ("ws", "wss"))
    if len(schemes) > 1:
        raise ConfigurationError("option 'servers': websocket and other addresses do not mix")


def _place(url: str) -> str:
    # Not through urlsplit's user and password: the url may be one that it cannot read.
    scheme, found, rest = url.partition("://")
    return f"{scheme if found else 'nats'}://{(rest if found else url).rpartition('@')[2]}"


class Connection:
    """One connection, its JetStream API prefix and its time limits.

    Attributes:
        client: nats-py's client.
        settings: what it was made from.
        reconnects: how often it was lost and made again.
        online: set while there is a connection.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings
        self.client: Client = tapped_client()
        self.reconnects = 0
        self.online = asyncio.Event()
        self._offline = asyncio.Event()
        self._trouble: Exception | None = None
        self._refused: asyncio.Future[None] | None = None
        self._under_way: dict[asyncio.Future[Any], str] = {}
        self._denials: dict[asyncio.Future[Any], str] = {}
        self._denied_inbox: str | None = None
        self._inboxes: list[Inbox] = []

    def __repr__(self) -> str:
        state = "connected" if self.client.is_connected else "not connected"
        return f"<Connection {self.settings.places} {state} reconnects={self.reconnects}>"

    @classmethod
    async def open(cls, settings: ConnectionSettings) -> Connection:
        """Connect within ``connect_timeout``.

        Raises:
            AuthorizationError: the server refused the credentials.
            ConnectError: no server answered in time; with the last reason.
        """
        connection = cls(settings)
        connection._refused = asyncio.get_running_loop().create_future()
        attempt = asyncio.create_task(connection._connect())
        try:
            await asyncio.wait(
                {attempt, connection._refused},
                timeout=settings.connect_timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if connection._refused.done():
                raise AuthorizationError(
                    f"{settings.places} refused the credentials: check the options 'user', "
                    f"'password' and 'token'"
                )
            if not attempt.done():
                reason = f": {connection._trouble}" if connection._trouble else ""
                raise ConnectError(
                    f"no connection to {settings.places} within {settings.connect_timeout:g} s "
                    f"(option 'connectTimeout'){reason}"
                )
            attempt.result()
            connection.online.set()
        except BaseException:
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
            await connection.close()
            raise
        finally:
            connection._refused.cancel()
        return connection

    async def _connect(self) -> None:
        settings = self.settings
        _check_servers(settings)
        try:
            await self.client.connect(
                servers=list(settings.servers),
                user=settings.user,
                password=settings.password,
                token=settings.token,
                name="nats-stream-source",
                inbox_prefix=settings.inbox_prefix,
                connect_timeout=settings.connect_timeout,  # type: ignore[arg-type]
                reconnect_time_wait=_RECONNECT_WAIT,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnect,
                reconnected_cb=self._on_reconnect,
            )
        except nats.errors.Error as error:
            raise ConnectError(f"no connection to {settings.places}: {error}") from error

    async def _on_error(self, error: Exception) -> None:
        text = str(error).lower()
        self._trouble = error
        if "authorization violation" in text and self._refused and not self._refused.done():
            self._refused.set_result(None)
        if denied := _DENIED.search(text):
            self._deny(denied[1])

    async def _on_disconnect(self) -> None:
        self.online.clear()
        self._offline.set()
        for inbox in self._inboxes:
            inbox.wake()

    async def _on_reconnect(self) -> None:
        self.reconnects += 1
        self._offline.clear()
        self.online.set()
        for inbox in self._inboxes:
            inbox.wake()

    async def alive(self, timeout: float) -> bool:
        """Whether a PING is answered within ``timeout`` seconds.

        The PING overtakes what nats-py has buffered and not written yet. After False the
        connection must be closed: nats-py's read loop does not survive the PONG of a PING that
        was given up.
        """
        ping = asyncio.ensure_future(self.client.rtt(timeout))  # type: ignore[arg-type]
        # nats-py forgets the PINGs under way when it reconnects: no reason to wait for their PONGs.
        offline = asyncio.ensure_future(self._offline.wait())
        try:
            await asyncio.wait({ping, offline}, return_when=asyncio.FIRST_COMPLETED)
            if not ping.done():
                return False
            ping.result()
        except (nats.errors.Error, OSError, AttributeError, AssertionError):
            # The last two: nats-py has no transport between two attempts to reconnect.
            return False
        finally:
            for task in (ping, offline):
                task.cancel()
            await asyncio.gather(ping, offline, return_exceptions=True)
        return True

    def renew(self) -> None:
        """Break the connection off, so that nats-py makes it anew and subscribes again."""
        if self.client.is_connected:
            self.online.clear()
            abort(self.client)

    async def close(self) -> None:
        """Close the connection for good; safe to call again, also where it never was open.

        Never fails: a connection is closed because it is not needed, or because something failed
        already, which must not be covered up by a broken pipe.
        """
        try:
            await asyncio.wait_for(self.client.close(), _CLOSE_DEADLINE)
        except (OSError, asyncio.TimeoutError, nats.errors.Error, AssertionError) as error:
            # AssertionError: nats-py's own check, when connecting failed early.
            log.debug("closing %r: %r", self, error)
            abort(self.client)

    async def inbox(self, subject: str) -> Inbox:
        """A tapped subscription; the caller closes it with :meth:`release`.

        Raises:
            ConnectError: the connection is closed.
        """
        try:
            inbox = await open_inbox(self.client, subject)
        except nats.errors.Error as error:
            raise ConnectError(f"the connection to {self.settings.places} is closed") from error
        self._inboxes.append(inbox)
        return inbox

    async def release(self, inbox: Inbox) -> None:
        """End a tapped subscription."""
        if inbox in self._inboxes:
            self._inboxes.remove(inbox)
        if not self.client.is_closed:
            await inbox.close()

    async def request(self, subject: str, payload: bytes = b"") -> Msg:
        """Ask and wait for one answer, at most ``request_timeout`` seconds.

        Raises:
            PermissionDeniedError: the user may not publish to ``subject`` or has no inbox.
            JetStreamNotEnabledError: nobody listens on an API subject.
            RequestTimeoutError: no answer in time.
        """
        return await self.until_denied(
            subject, lambda: self.client.request(subject, payload, self.settings.request_timeout)
        )

    async def until_denied(self, subject: str, action: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``action``; end it early when the server denies ``subject`` or an inbox."""
        if denied := self._denied_inbox:
            raise self._denial(denied)
        attempt = asyncio.ensure_future(action())
        self._under_way[attempt] = subject
        try:
            return await attempt
        except asyncio.CancelledError:
            if (denied := self._denials.get(attempt)) is None:
                raise  # it was not the server's denial that ended it
            raise self._denial(denied) from None
        except nats.errors.NoRespondersError as error:
            raise JetStreamNotEnabledError(
                f"nobody answers on {subject!r}: JetStream is off for this account or server, or "
                f"the options 'domain' and 'apiPrefix' do not lead to it"
            ) from error
        except nats.errors.TimeoutError as error:
            raise RequestTimeoutError(
                f"{self.settings.places} did not answer on {subject!r} within "
                f"{self.settings.request_timeout:g} s (option 'requestTimeout')"
            ) from error
        except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError) as error:
            raise ConnectError(f"the connection to {self.settings.places} is closed") from error
        finally:
            del self._under_way[attempt]
            self._denials.pop(attempt, None)

    def _denial(self, denied: str) -> PermissionDeniedError:
        return PermissionDeniedError(
            f"the user may not use the subject {denied!r}: add it to the user's permissions, or "
            f"change the option 'inboxPrefix' or 'apiPrefix'"
        )

    def _deny(self, denied: str) -> None:
        """End what is under way and needs ``denied``; the server does not say which request."""
        inbox = denied.startswith(self.settings.inbox_prefix.lower() + ".")
        if inbox:
            # The inbox for answers is subscribed to once: later requests would wait in vain too.
            self._denied_inbox = f"{self.settings.inbox_prefix}.>"
        for attempt, subject in self._under_way.items():
            # nats-py has made the server's text lower case; permissions are not.
            if inbox or subject.lower() == denied:
                self._denials[attempt] = self._denied_inbox or subject
                attempt.cancel()
