"""Failures to connect: which of them are permanent, and the error that the user gets.

nats-py reports each failed attempt and tries the next server. A failure is permanent if another
attempt at the same server would fail in the same way: refused credentials, credentials that are too
long, a TLS handshake without trust, a file that became invalid.

A server that cannot be reached (a refused connection, an unknown host) is a transient failure. It
ends the connecting too if the caller does not retry, once each server has failed.
"""

from __future__ import annotations

import asyncio
import errno
import socket

import nats.errors

from nats_stream_source.connection import tls
from nats_stream_source.connection.authentication import Authentication, InvalidCredentialsError
from nats_stream_source.connection.nats_py.handshake import (
    REFUSALS,
    LongConnectError,
    PlainServerError,
)
from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.errors import ConnectError, NatsSourceError, TlsError


class ConnectFailures:
    """The failed attempts of one connection since it was last connected.

    Attributes:
        retry: whether servers that cannot be reached are tried again.
        permanent: the last permanent failure; None if all failures were transient.
    """

    def __init__(self, settings: ConnectionSettings, authentication: Authentication) -> None:
        self._settings = settings
        self._authentication = authentication
        self._last: Exception | None = None
        self._unreachable = 0
        self.retry = True
        self.permanent: NatsSourceError | None = None

    def add(self, error: Exception) -> NatsSourceError | None:
        """Record a failed attempt; returns the named error if the failure is permanent."""
        # A server at its connection limit reports that and closes the connection, and the report is
        # mostly lost with it: one received report explains the resets of the other attempts.
        reported = isinstance(self._last, nats.errors.Error)
        no_response = isinstance(error, asyncio.TimeoutError) and not error.args
        if not (no_response or (reported and isinstance(error, ConnectionResetError))):
            self._last = error
        self._unreachable += isinstance(error, OSError)
        if (permanent := self.classify(error)) is not None:
            self.permanent = permanent
        return permanent

    def classify(self, error: Exception) -> NatsSourceError | None:
        """The named error for a permanent failure; None for a transient one."""
        if isinstance(error, InvalidCredentialsError):
            return error.reason
        servers = self._settings.server_list
        if isinstance(error, PlainServerError):
            return TlsError(
                f"{servers} does not encrypt, and TLS was asked for (tls:// in 'servers', or a TLS "
                f"setting); nothing was sent to it",
                settings=("servers",),
            )
        if isinstance(error, LongConnectError):
            return self._authentication.too_long_error()
        if any(refusal in str(error).lower() for refusal in REFUSALS):
            return self._authentication.refused_error()
        return tls.handshake_error(error, servers)

    @property
    def exhausted(self) -> bool:
        """Whether each server was tried and not reached, and no further attempt is to be made."""
        # nats-py tries the servers in turn.
        return not self.retry and self._unreachable >= len(self._settings.servers)

    def connect_error(self) -> ConnectError:
        """The error if no server was reached; it contains the last failure."""
        settings = self._settings
        if self.exhausted and self._last is not None:
            return ConnectError(
                f"could not connect to {settings.server_list}: {self._reason(self._last)}; check "
                f"'servers'",
                settings=("servers",),
            )
        if self._last is not None:
            reason = self._reason(self._last)
        elif settings.uses_websocket:
            reason = "no response"
        elif settings.tls_handshake_first:
            reason = (
                "no response; 'tls_handshake_first' must be left out if the server sends INFO first"
            )
        else:
            reason = (
                "no response; 'tls_handshake_first' must be set if the server waits for the TLS "
                "handshake"
            )
        return ConnectError(
            f"could not connect to {settings.server_list} within {settings.connect_timeout:g} s "
            f"('connect_timeout'): {reason}",
            settings=("connect_timeout", "tls_handshake_first")
            if self._last is None and not settings.uses_websocket
            else ("connect_timeout",),
        )

    def _reason(self, error: Exception) -> str:
        if isinstance(error, socket.gaierror):
            return f"the host name cannot be resolved ({error.strerror})"
        text = self._authentication.redact(error)
        # A name with several addresses: asyncio joins the texts of one error per address.
        refused = text.count(f"[Errno {errno.ECONNREFUSED}]")
        if refused and refused == text.count("[Errno"):
            return "connection refused"
        return text
