"""A connection to NATS: how to make one, whether it lives, and requests that fail with a reason.

nats-py does the work. What this module adds: one deadline for the whole of connecting, errors that
name the option to change, permission violations (which the server reports apart from the request)
joined to the request that met them, and a liveness check that is a PING/PONG and not a flag.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from nats_stream_source.errors import (
    AuthorizationError,
    ConnectError,
    JetStreamNotEnabledError,
    MessageTooLargeError,
    NatsSourceError,
    PermissionDeniedError,
    RequestTimeoutError,
    TlsError,
)
from nats_stream_source.jetstream import tls
from nats_stream_source.jetstream.bridge import (
    Inbox,
    abort,
    open_inbox,
    reads,
    tapped_client,
)
from nats_stream_source.jetstream.finishing import finish
from nats_stream_source.jetstream.handshake import (
    PlainServerError,
    Reconnects,
    check_greetings,
    demand_tls,
    forget_attempt,
    give_up,
)
from nats_stream_source.jetstream.identity import Identity, UnusableError
from nats_stream_source.jetstream.repairs import REFUSALS, outlive
from nats_stream_source.jetstream.settings import ConnectionSettings
from nats_stream_source.jetstream.within import ended, within
from nats_stream_source.logs import field_logger

__all__ = ["Companion", "Connection", "ConnectionSettings"]

T = TypeVar("T")


class Companion(Protocol):
    """What there is one of for each connection, and what ends with it."""

    def __init__(self, connection: Connection) -> None: ...

    def denied(self, subject: str | None, error: Exception) -> None:
        """The server denied ``subject`` (in lower case), or with None the inboxes."""

    async def close(self) -> None:
        """The connection is being closed."""


C = TypeVar("C", bound=Companion)

log = field_logger(__name__)

_CLOSE_DEADLINE = 2.0  # seconds
_LEAST_ATTEMPT = 1.0  # seconds that a server is given for each step of connecting
_RECONNECT_WAIT = 0.1  # seconds between two attempts at the same server
_REFUSED_WAIT = 1.0  # the same, once it has refused the credentials: some lock out who hammers
_DENIED = re.compile(r'permissions violation for (?:publish|subscription) to "([^"]+)"')


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
        in_the_clear = settings.encrypted and not settings.tls_handshake_first
        check_greetings(self.client, believe=settings.websocket or not in_the_clear)
        if settings.encrypted and not settings.websocket:
            demand_tls(self.client)
        outlive(self.client)
        self._reconnects = Reconnects(self.client)
        self.reconnects = 0
        self.online = asyncio.Event()
        self._offline = asyncio.Event()
        self._identity = Identity(settings)
        self._trouble: Exception | None = None
        self._verdict: NatsSourceError | None = None
        self._refused: asyncio.Future[None] | None = None
        self._under_way: dict[asyncio.Future[Any], str] = {}
        self._denials: dict[asyncio.Future[Any], str] = {}
        self._denied_inbox: str | None = None
        self._inboxes: list[Inbox] = []
        self._companions: dict[type[Any], Any] = {}
        self._closed = False
        self._renewal: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "connected" if self.client.is_connected else "not connected"
        return f"<Connection {self.settings.places} {state} reconnects={self.reconnects}>"

    @classmethod
    async def open(cls, settings: ConnectionSettings) -> Connection:
        """Connect within ``connect_timeout``.

        What a single server answers in a way that will not change is raised at once; of several
        servers another one may answer otherwise, so all are tried until the time is over.

        Raises:
            ConfigurationError: the settings contradict each other; a file is missing, unreadable
                or not what it should be.
            AuthorizationError: the server refused the credentials.
            TlsError: no encrypted connection that both sides trust, where one was asked for.
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
            if connection._verdict is not None and not attempt.done():
                raise connection._verdict
            if not attempt.done():
                raise connection._too_late()
            attempt.result()
            connection.online.set()
        except BaseException:
            await ended({attempt}, _CLOSE_DEADLINE)
            await connection.close()
            raise
        finally:
            connection._refused.cancel()
        return connection

    async def _connect(self) -> None:
        settings = self.settings
        # A server that accepts and stays silent must leave time for the others; but where many are
        # named, one that is far away must have the time to answer at all.
        one_attempt = min(
            settings.connect_timeout,
            max(settings.connect_timeout / len(settings.servers), _LEAST_ATTEMPT),
        )
        try:
            await self.client.connect(
                servers=list(settings.servers),
                name="nats-stream-source",
                inbox_prefix=settings.inbox_prefix,
                connect_timeout=one_attempt,  # type: ignore[arg-type]
                reconnect_time_wait=_RECONNECT_WAIT,  # type: ignore[arg-type]
                max_reconnect_attempts=-1,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnect,
                reconnected_cb=self._on_reconnect,
                **self._identity.options(),
            )
        except nats.errors.Error as error:
            reason = self._identity.scrubbed(error)
            raise ConnectError(f"no connection to {settings.places}: {reason}") from None
        if not self.client.is_connected:
            # A server that hangs up instead of answering counts for nats-py as connected and lost.
            await self.online.wait()

    def _too_late(self) -> ConnectError:
        settings = self.settings
        reason = (
            self._identity.scrubbed(self._trouble)
            if self._trouble
            else "no answer; the option 'tlsHandshakeFirst' must be "
            + (
                "left out where the server greets first"
                if settings.tls_handshake_first
                else "set where the server waits for the TLS handshake"
            )
        )
        return ConnectError(
            f"no connection to {settings.places} within {settings.connect_timeout:g} s "
            f"(option 'connectTimeout'): {reason}"
        )

    async def _on_error(self, error: Exception) -> None:
        text = str(error).lower()
        # A server without a place for one more client says so and hangs up, and mostly what it said
        # is lost with the connection: what was heard once explains the silence of the other times.
        said = isinstance(self._trouble, nats.errors.Error)
        if not (said and isinstance(error, ConnectionResetError)):
            self._trouble = error
        forget_attempt(self.client)
        if (verdict := self._judge(error, text)) is not None:
            self._verdict = verdict
            settled = not isinstance(verdict, TlsError) or len(self.settings.servers) == 1
            if self._refused is not None and not self._refused.done():
                if settled:
                    self._refused.set_result(None)
            elif isinstance(verdict, AuthorizationError):
                self.client.options["reconnect_time_wait"] = _REFUSED_WAIT
        if denied := _DENIED.search(text):
            self._deny(denied[1])

    def _judge(self, error: Exception, text: str) -> NatsSourceError | None:
        """The named error for a failure to connect that will not pass; None for all others."""
        if isinstance(error, UnusableError):
            return error.reason
        if isinstance(error, PlainServerError):
            return TlsError(
                f"{self.settings.places} does not encrypt, and TLS was asked for (tls:// in the "
                f"option 'servers', or an option of TLS): nothing was sent to it"
            )
        if any(sign in text for sign in REFUSALS):
            return self._identity.refused()
        return tls.explain(error, self.settings.places)

    async def _on_disconnect(self) -> None:
        self.online.clear()
        self._offline.set()
        self._identity.renew()
        # All is subscribed to anew, perhaps with other permissions.
        self._denied_inbox = None
        for inbox in self._inboxes:
            inbox.wake()

    async def _on_reconnect(self) -> None:
        self.reconnects += 1
        self._verdict = None
        self.client.options["reconnect_time_wait"] = _RECONNECT_WAIT
        self._offline.clear()
        self.online.set()
        for inbox in self._inboxes:
            inbox.wake()

    async def alive(self, timeout: float, longest: float = 0.0) -> bool:
        """Whether a PING is answered within ``timeout`` seconds.

        The PING overtakes what nats-py has buffered and not written yet.

        Args:
            longest: wait up to so many seconds while something is received every ``timeout``
                seconds: on a slow line a lot may stand before the PONG.
        """
        most = max(timeout, longest)
        ping = asyncio.ensure_future(self.client.rtt(most))  # type: ignore[arg-type]
        # nats-py forgets the PINGs under way when it reconnects: no reason to wait for their PONGs.
        offline = asyncio.ensure_future(self._offline.wait())
        try:
            while True:
                before = reads(self.client)
                done, _ = await asyncio.wait(
                    {ping, offline}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if done or not longest or reads(self.client) == before:
                    break
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

    async def until_connected(self, seconds: float) -> None:
        """Return once there is a connection.

        Raises:
            AuthorizationError, TlsError, ConfigurationError: it was not made again within
                ``seconds`` because the server refuses what it is shown, or that is unusable now.
            ConnectError: it is closed, or was not made again for another reason.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        # Both: nats-py knows of a loss before it calls back, and nothing yet of a renewal.
        while not (self.client.is_connected and self.online.is_set()):
            if self.client.is_closed:
                raise ConnectError(f"the connection to {self.settings.places} is closed")
            if asyncio.get_running_loop().time() > deadline:
                if self._verdict is not None:
                    raise self._verdict
                raise ConnectError(
                    f"the connection to {self.settings.places} was lost, and not made again "
                    f"within {seconds:g} s"
                )
            await asyncio.sleep(0.01)

    def renew(self) -> None:
        """Break the connection off, so that nats-py makes it anew and subscribes again."""
        if self.client.is_connected:
            self.online.clear()
            abort(self.client)
            # Not left to nats-py's read loop, which would see the end: it may be what has ended.
            self._renewal = asyncio.ensure_future(self.client.force_reconnect())

    def companion(self, kind: type[C]) -> C:
        """The one ``kind(connection)`` of this connection, which is closed with it.

        Raises:
            ConnectError: the connection is closed.
        """
        if self._closed:
            raise ConnectError(f"the connection to {self.settings.places} is closed")
        found: C | None = self._companions.get(kind)
        if found is None:
            found = self._companions[kind] = kind(self)
        return found

    async def close(self) -> None:
        """Close the connection for good; safe to call again, also where it never was open.

        Never fails: a connection is closed because it is not needed, or because something failed
        already, which must not be covered up by a broken pipe. Also cancelled, it closes first.
        """
        self._closed = True  # at once: nothing may begin on it meanwhile
        await finish(self._close())

    async def _close(self) -> None:
        companions, self._companions = list(self._companions.values()), {}
        for companion in companions:
            await companion.close()
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
        await self._reconnects.end(_CLOSE_DEADLINE)
        try:
            await within(_CLOSE_DEADLINE, self.client.close())
        except (
            OSError,
            asyncio.TimeoutError,
            nats.errors.Error,
            AssertionError,
            AttributeError,
        ) as error:
            # AssertionError: nats-py's own check, when connecting failed early. AttributeError:
            # asyncio's TLS transport is written to after it was lost.
            log.debug("while closing", connection=self, error=repr(error))
        await give_up(self.client, _CLOSE_DEADLINE)

    async def inbox(self, subject: str, queue: str = "") -> Inbox:
        """A tapped subscription; the caller closes it with :meth:`release`.

        ``queue`` names the queue group to be a member of, if any.

        Raises:
            ConnectError: the connection is closed.
        """
        try:
            inbox = await open_inbox(self.client, subject, queue)
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
            AuthorizationError: there is no connection in that time, since the server refuses the
                credentials.
            MessageTooLargeError: more than the server's ``max_payload``.
        """
        return await self.until_denied(
            subject, lambda: self.client.request(subject, payload, self.settings.request_timeout)
        )

    async def until_denied(self, subject: str, action: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``action``; end it early when the server denies ``subject`` or an inbox."""
        self.check_inboxes()
        attempt = asyncio.ensure_future(action())
        self._under_way[attempt] = subject
        try:
            return await within(None, attempt)
        except asyncio.CancelledError:
            if (denied := self._denials.get(attempt)) is None:
                raise  # it was not the server's denial that ended it
            raise self.denial(denied) from None
        except nats.errors.NoRespondersError as error:
            raise JetStreamNotEnabledError(
                f"nobody answers on {subject!r}: JetStream is off for this account or server, or "
                f"the options 'domain' and 'apiPrefix' do not lead to it"
            ) from error
        except nats.errors.TimeoutError as error:
            if self._verdict is not None and not self.online.is_set():
                raise self._verdict from error
            raise RequestTimeoutError(
                f"{self.settings.places} did not answer on {subject!r} within "
                f"{self.settings.request_timeout:g} s (option 'requestTimeout')"
            ) from error
        except (nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError) as error:
            raise ConnectError(f"the connection to {self.settings.places} is closed") from error
        except nats.errors.MaxPayloadError as error:
            raise MessageTooLargeError(
                f"a request on {subject!r} exceeds the server's max_payload of "
                f"{self.client.max_payload} bytes"
            ) from error
        finally:
            del self._under_way[attempt]
            self._denials.pop(attempt, None)

    def check_inboxes(self) -> None:
        """Raise PermissionDeniedError if the server has denied the inboxes on this connection."""
        if denied := self._denied_inbox:
            raise self.denial(denied)

    def denial(self, denied: str) -> PermissionDeniedError:
        """The error for a subject that the server has denied."""
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
        for companion in self._companions.values():
            companion.denied(None if inbox else denied, self.denial(self._denied_inbox or denied))
        for attempt, subject in self._under_way.items():
            # nats-py has made the server's text lower case; permissions are not.
            if inbox or subject.lower() == denied:
                self._denials[attempt] = self._denied_inbox or subject
                attempt.cancel()
