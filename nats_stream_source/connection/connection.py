"""A connection to NATS: connecting, reconnecting, liveness, requests with named errors.

nats-py does the work. This module adds one deadline for the whole of connecting, named errors with
the settings to change, permission violations (which the server reports apart from the request)
joined to the request, and a liveness check by PING/PONG instead of a flag.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from nats_stream_source.aio.tasks import cancel_and_wait, run_to_completion
from nats_stream_source.connection.authentication import Authentication, ConnectFailures
from nats_stream_source.connection.control_line import ControlLine
from nats_stream_source.connection.inbox import Inbox
from nats_stream_source.connection.nats_py.handshake import (
    Reconnects,
    apply_patches,
    close_client,
    close_failed_attempt,
    verify_info,
)
from nats_stream_source.connection.nats_py.server_pool import spread_attempts
from nats_stream_source.connection.nats_py.socket_tap import (
    SocketWriter,
    abort,
    open_inbox,
    read_count,
    tapped_client,
)
from nats_stream_source.connection.permissions import DeniedSubjects
from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.errors import (
    AuthorizationError,
    ConnectError,
    InvalidNameError,
    JetStreamNotEnabledError,
    MessageTooLargeError,
    RequestTimeoutError,
    TlsError,
)
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.framing import scanner

__all__ = ["Connection", "ConnectionService", "ConnectionSettings"]

SCANNER_VARIABLE = "NATS_STREAM_SOURCE_SCANNER"
"""Environment variable with the name of the frame scanner: ``compiled`` or ``python``."""

log = field_logger(__name__)
T = TypeVar("T")


@functools.cache
def select_frame_scanner() -> scanner.Scanner:
    """Select the frame scanner of this process once, and return its name.

    Without :data:`SCANNER_VARIABLE` it is the compiled one, where the installation has it.

    Raises:
        ConfigurationError: this installation lacks the scanner that the variable names.
    """
    wanted = os.environ.get(SCANNER_VARIABLE)
    name = scanner.select(wanted)
    log.debug("frame scanner selected", scanner=name)
    if name == "python" and not wanted:
        log.warning(
            "the compiled frame scanner is missing",
            scanner=name,
            action="install a wheel of this platform, or a C compiler and then the package again",
        )
    return name


class ConnectionService(Protocol):
    """A component of which each connection has one instance, and which it closes."""

    def __init__(self, connection: Connection) -> None: ...

    def on_denied(self, subject: str | None, error: Exception) -> None:
        """The server denied messages to ``subject``, or the inboxes if it is None."""

    async def close(self) -> None:
        """Called while the connection closes."""


C = TypeVar("C", bound=ConnectionService)
_SID_LENGTH = 12  # bytes of a SUB beside subject and queue: spaces and the number
_REPLY_TOKENS = 50  # bytes of a reply of nats-py after the inbox prefix
_CLOSE_DEADLINE = 2.0  # seconds
_RECONNECT_WAIT = 0.1  # seconds between two attempts at the same server
_REFUSED_WAIT = 1.0  # the same, after refused credentials: some servers lock out frequent attempts


class Connection:
    """One connection, its JetStream API prefix and its time limits.

    Attributes:
        client: nats-py's client.
        writer: writes many frames at once to its socket.
        settings: the settings of the connection.
        control_line: validates the length of subjects.
        reconnects: the number of reconnects.
        online: set while the client is connected.
        denial_listeners: called like :meth:`ConnectionService.on_denied`.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        select_frame_scanner()
        self.settings = settings
        self.client: Client = tapped_client()
        self.writer = SocketWriter(self.client)
        info_before_tls = settings.requires_tls and not settings.tls_handshake_first
        verify_info(
            self.client,
            require_tls=settings.requires_tls and not settings.uses_websocket,
            trust_first_info=settings.uses_websocket or not info_before_tls,
        )
        apply_patches(self.client)
        spread_attempts(self.client, settings.server_urls, settings.connect_timeout)
        self._reconnects = Reconnects(self.client)
        self.reconnects = 0
        self.online = asyncio.Event()
        self._offline = asyncio.Event()
        self._authentication = Authentication(settings)
        self._failures = ConnectFailures(settings, self._authentication)
        self._failed: asyncio.Future[None] | None = None  # done at a permanent failure, in open()
        self.control_line = ControlLine(settings.max_control_line)
        self._denied = DeniedSubjects(settings.inbox_prefix, self.control_line)
        self._inboxes: list[Inbox] = []
        self._services: dict[type[Any], Any] = {}
        self.denial_listeners: list[Callable[[str | None, Exception], None]] = []
        self._closed = False
        self._forced_reconnect: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "connected" if self.client.is_connected else "not connected"
        return f"<Connection {self.settings.server_list} {state} reconnects={self.reconnects}>"

    @classmethod
    async def open(cls, settings: ConnectionSettings, *, retry: bool = True) -> Connection:
        """Connect within ``connect_timeout``.

        With one server, a permanent failure is raised at once. With several servers, another server
        may accept the connection, so all are tried until the deadline; without ``retry``, a server
        that cannot be reached is tried once.

        Raises:
            ConfigurationError: the settings contradict each other; a file is missing, unreadable
                or invalid.
            AuthorizationError: the server refused the credentials.
            TlsError: TLS is required, and an encrypted connection with mutual trust failed.
            ConnectError: no server accepted the connection in time; with the last reason.
        """
        connection = cls(settings)
        connection._failures.retry = retry
        connection._failed = asyncio.get_running_loop().create_future()
        attempt = asyncio.create_task(connection._connect())
        try:
            await asyncio.wait(
                {attempt, connection._failed},
                timeout=settings.connect_timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if connection._failures.permanent is not None and not attempt.done():
                raise connection._failures.permanent
            if not attempt.done():
                raise connection._failures.connect_error()
            attempt.result()
            connection.online.set()
        except BaseException:
            await cancel_and_wait({attempt}, _CLOSE_DEADLINE)
            await connection.close()
            raise
        finally:
            connection._failed.cancel()
        return connection

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _connect(self) -> None:
        settings = self.settings
        try:
            await self.client.connect(
                servers=[str(url) for url in settings.server_urls],
                name="nats-stream-source",
                inbox_prefix=settings.inbox_prefix,
                reconnect_time_wait=_RECONNECT_WAIT,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnect,
                reconnected_cb=self._on_reconnect,
                **self._authentication.connect_arguments(),
            )
        except nats.errors.Error as error:
            reason = self._authentication.redact(error)
            raise ConnectError(
                f"could not connect to {settings.server_list}: {reason}", settings=("servers",)
            ) from None
        if not self.client.is_connected:
            # nats-py treats a server that closes instead of responding as connected and lost.
            await self.online.wait()

    async def _on_error(self, error: Exception) -> None:
        permanent = self._failures.add(error)
        close_failed_attempt(self.client)
        if permanent is not None:
            final = not isinstance(permanent, TlsError) or len(self.settings.servers) == 1
            if self._failed is not None and not self._failed.done():
                if final:
                    self._failed.set_result(None)
            elif isinstance(permanent, AuthorizationError):
                self.client.options["reconnect_time_wait"] = _REFUSED_WAIT
        elif self._failures.exhausted and self._failed is not None and not self._failed.done():
            self._failed.set_result(None)
        if (violation := self._denied.add(str(error))) is not None:
            for listener in list(self.denial_listeners):
                listener(*violation)

    async def _on_disconnect(self) -> None:
        self.online.clear()
        self._offline.set()
        self._authentication.reload_certificate()
        # nats-py subscribes to everything again, perhaps with other permissions.
        self._denied.forget()
        for inbox in self._inboxes:
            inbox.wake()

    async def _on_reconnect(self) -> None:
        self.reconnects += 1
        self.control_line.longest = 0
        self._failures.permanent = None
        self.client.options["reconnect_time_wait"] = _RECONNECT_WAIT
        self._offline.clear()
        self.online.set()
        for inbox in self._inboxes:
            inbox.wake()

    async def alive(self, timeout: float, max_wait: float = 0.0) -> bool:
        """Whether the server responds to a PING within ``timeout`` seconds.

        The PING overtakes what nats-py has buffered and not written yet.

        Args:
            max_wait: wait up to this many seconds as long as something is received every
                ``timeout`` seconds: on a slow line much data may precede the PONG.
        """
        client = self.client
        limit = max(timeout, max_wait)
        ping = asyncio.ensure_future(client.rtt(limit))  # type: ignore[arg-type]
        # nats-py drops the pending PINGs when it reconnects, so their PONGs never arrive.
        offline = asyncio.ensure_future(self._offline.wait())
        try:
            while True:
                before = read_count(client)
                done, _ = await asyncio.wait(
                    {ping, offline}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if done or not max_wait or read_count(client) == before:
                    break
            if not ping.done():
                return False
            ping.result()
        except (nats.errors.Error, OSError, AttributeError, AssertionError):
            # The last two: nats-py does not have a transport between two attempts to reconnect.
            return False
        finally:
            for task in (ping, offline):
                task.cancel()
            await asyncio.gather(ping, offline, return_exceptions=True)
        return True

    async def wait_connected(self, seconds: float, waited: float = 0.0) -> None:
        """Return once the client is connected; ``waited`` of the ``seconds`` have passed.

        Raises:
            AuthorizationError, TlsError, ConfigurationError: it did not reconnect within
                ``seconds`` because of a permanent failure.
            ConnectError: it is closed, or did not reconnect for another reason.
        """
        deadline = asyncio.get_running_loop().time() + seconds - waited
        # Both: nats-py's flag changes before its callbacks run, and a forced reconnect changes
        # only the event at first.
        while not (self.client.is_connected and self.online.is_set()):
            if self.client.is_closed:
                raise self._closed_error()
            if (late := asyncio.get_running_loop().time() - deadline) > 0:
                if self._failures.permanent is not None:
                    raise self._failures.permanent
                lost = ConnectError(
                    f"the connection to {self.settings.server_list} was lost, and could not be "
                    f"restored within {seconds:g} s"
                )
                lost.waited = seconds + late
                raise lost
            await asyncio.sleep(0.01)

    def reconnect(self) -> None:
        """Close the socket, so that nats-py reconnects and subscribes again."""
        if self.client.is_connected:
            self.online.clear()
            abort(self.client)
            # Not left to nats-py's read loop, which would notice the end: it may itself have ended.
            self._forced_reconnect = asyncio.ensure_future(self.client.force_reconnect())

    def service(self, kind: type[C]) -> C:
        """The one instance ``kind(connection)`` of this connection, which closes it.

        Raises:
            ConnectError: the connection is closed.
        """
        if self._closed:
            raise self._closed_error()
        instance: C | None = self._services.get(kind)
        if instance is None:
            instance = self._services[kind] = kind(self)
            self.denial_listeners.append(instance.on_denied)
        return instance

    async def open_inbox(self, subject: str, queue: str = "", *, verify: bool = False) -> Inbox:
        """Subscribe with a tap, in a queue group if given; end it with :meth:`close_inbox`.

        Args:
            verify: wait until the server has accepted or refused the subscription.

        Raises:
            ConnectError: the connection is closed.
            InvalidNameError: the subject is invalid, or longer than the server accepts.
            PermissionDeniedError: the server refuses more subscriptions.
        """
        self.control_line.validate(subject, len(queue) + _SID_LENGTH)
        refused = self._denied.subscriptions
        try:
            inbox = await open_inbox(self.client, subject, queue)
        except nats.errors.BadSubjectError as error:
            problem = "expected tokens that are not empty, without white space"
            raise InvalidNameError(f"could not subscribe to {subject!r}: {problem}") from error
        except nats.errors.Error as error:
            raise self._closed_error() from error
        self._inboxes.append(inbox)
        try:
            if verify or refused:
                # The server sends a permission error before the PONG.
                await self.run_until_denied(
                    subject, lambda: self._denied.verify_subscription(subject, refused, self.alive)
                )
        except BaseException:
            await self.close_inbox(inbox)
            raise
        return inbox

    async def close_inbox(self, inbox: Inbox) -> None:
        """End a tapped subscription."""
        if inbox in self._inboxes:
            self._inboxes.remove(inbox)
        if not self.client.is_closed:
            await inbox.close()

    async def publish(self, subject: str, payload: bytes = b"", reply: str = "") -> None:
        """Publish a message; it is in nats-py's buffer afterwards.

        Raises:
            NameTooLongError: the line is longer than the server accepts.
            nats.errors.Error: as nats-py's ``publish``.
        """
        self.control_line.validate(subject, len(reply) + len(str(len(payload))) + 2)
        await self.client.publish(subject, payload, reply=reply)

    async def request(self, subject: str, payload: bytes = b"") -> Msg:
        """Send a request and wait for one response, at most ``request_timeout`` seconds.

        Raises:
            PermissionDeniedError: the user may not publish to ``subject``, or may not subscribe to
                the inbox.
            JetStreamNotEnabledError: the API subject does not have a responder.
            RequestTimeoutError: the response did not arrive in time.
            AuthorizationError: the client is not connected in that time, since the server refuses
                the credentials.
            MessageTooLargeError: the request exceeds the server's ``max_payload``.
            NameTooLongError: the subject is longer than the server accepts.
        """
        reply = len(self.settings.inbox_prefix) + _REPLY_TOKENS
        self.control_line.validate(subject, reply + len(str(len(payload))) + 2)
        return await self.run_until_denied(
            subject, lambda: self.client.request(subject, payload, self.settings.request_timeout)
        )

    async def run_until_denied(
        self, subject: str, action: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Run ``action``; end it early if the server denies ``subject`` or an inbox."""
        servers = self.settings.server_list
        await self.verify_inbox_permission()
        try:
            return await self._denied.run(subject, action)
        except nats.errors.NoRespondersError as error:
            raise JetStreamNotEnabledError(
                f"request on {subject!r} failed: no responders; enable JetStream for this account "
                f"and server, or change 'domain' or 'api_prefix'",
                settings=("domain", "api_prefix"),
            ) from error
        except nats.errors.TimeoutError as error:
            if self._failures.permanent is not None and not self.online.is_set():
                raise self._failures.permanent from error
            raise RequestTimeoutError(
                f"{servers} did not respond on {subject!r} within "
                f"{self.settings.request_timeout:g} s ('request_timeout')"
            ) from error
        except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError) as error:
            raise self._closed_error() from error
        except nats.errors.MaxPayloadError as error:
            raise MessageTooLargeError(
                f"a request on {subject!r} exceeds the server's max_payload of "
                f"{self.client.max_payload} bytes"
            ) from error

    async def verify_inbox_permission(self) -> None:
        """Raise PermissionDeniedError if the inboxes are denied; after a second, connect again."""
        if self._denied.outdated:
            self._denied.forget()
            self.reconnect()
            await self.wait_connected(self.settings.request_timeout)
        self._denied.verify_inboxes()

    def _closed_error(self) -> ConnectError:
        return ConnectError(f"the connection to {self.settings.server_list} is closed")

    async def close(self) -> None:
        """Close the connection; safe to call again, and if it was never open.

        It never fails: a connection is closed because it is not needed any more, or because of an
        earlier error, which a broken pipe must not replace. If cancelled, it closes first.
        """
        self._closed = True  # at once, so that nothing starts on it meanwhile
        await run_to_completion(self._close())

    async def _close(self) -> None:
        services, self._services = list(self._services.values()), {}
        for service in services:
            await service.close()
        reconnect, self._forced_reconnect = self._forced_reconnect, None
        if reconnect is not None:
            reconnect.cancel()
            await asyncio.gather(reconnect, return_exceptions=True)
        await self._reconnects.end(_CLOSE_DEADLINE)
        if (error := await close_client(self.client, _CLOSE_DEADLINE)) is not None:
            log.debug("error while closing", connection=self, error=repr(error))
