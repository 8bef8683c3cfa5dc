"""Authentication as arguments of nats-py's ``connect``, and failures to connect.

The files are read again for every attempt to connect, so that the next reconnect uses a renewed
file (a short-lived JWT, a client certificate).

*Failures.* nats-py reports each failed attempt and tries the next server. A failure is permanent if
another attempt at the same server would fail in the same way: refused credentials, credentials that
are too long, a TLS handshake without trust, a file that became invalid.

A server that cannot be reached (a refused connection, an unknown host) is a transient failure. It
ends the connecting too if the caller does not retry, once each server has failed.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import socket
import ssl
import time
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote

import nats.errors

from nats_stream_source.connection.credentials import (
    Credentials,
    handshake_error,
    load_client_certificate,
    make_context,
    nonce_signer,
    parse_seed_file,
    read_file,
)
from nats_stream_source.connection.nats_py.handshake import (
    REFUSALS,
    LongConnectError,
    PlainServerError,
)
from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.errors import (
    AuthorizationError,
    ConfigurationError,
    ConnectError,
    NatsSourceError,
    TlsError,
)
from nats_stream_source.logs import field_logger

log = field_logger(__name__)


class InvalidCredentialsError(nats.errors.Error):
    """A credentials file was valid and is invalid now; nats-py continues to reconnect.

    ``reason`` is the named error. nats-py does not get it: an unknown error would end its reconnect
    without a message.
    """

    def __init__(self, reason: ConfigurationError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Authentication:
    """Authenticates the client to the server, and the server to the client."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._context: ssl.SSLContext | None = None

    def connect_arguments(self) -> dict[str, Any]:
        """Arguments of nats-py's ``connect``.

        Raises:
            ConfigurationError: settings contradict each other; a file is missing, unreadable or
                invalid; the package for websocket is not installed.
        """
        settings = self._settings
        settings.validate()
        if settings.uses_websocket and importlib.util.find_spec("aiohttp") is None:
            raise ConfigurationError(
                "websocket URLs in 'servers' require the package aiohttp, which is not installed; "
                "pip install 'nats-stream-source[websocket]'",
                settings=("servers",),
            )
        arguments = self._auth_arguments()
        if settings.requires_tls:
            self._context = make_context(
                settings.tls_ca_file, settings.tls_cert_file, settings.tls_key_file
            )
            arguments["tls"] = self._context
            arguments["tls_handshake_first"] = settings.tls_handshake_first
        return arguments

    def _auth_arguments(self) -> dict[str, Any]:
        settings = self._settings
        if settings.credentials or settings.credentials_content:
            self._credentials()  # read now, so that an invalid file is reported at once
            return {
                "user_jwt_cb": lambda: self._credentials_for_nats_py().jwt.encode(),
                "signature_cb": nonce_signer(lambda: self._credentials_for_nats_py().seed),
            }
        if path := settings.nkey_seed_file:
            text = read_file(path, "nkey_seed_file")
            return {"nkeys_seed_str": parse_seed_file(text, "nkey_seed_file", path)}
        in_urls = [url.user_info for url in settings.server_urls if url.user_info is not None]
        user = in_urls[0] if in_urls else settings  # that of each server: nats_py/server_pool.py
        return {"user": user.user, "password": user.password, "token": user.token}

    def _credentials(self) -> Credentials:
        settings = self._settings
        if settings.credentials_content:
            return Credentials.parse(settings.credentials_content, "credentials_content")
        assert settings.credentials is not None
        text = read_file(settings.credentials, "credentials")
        return Credentials.parse(text, "credentials", settings.credentials)

    def _credentials_for_nats_py(self) -> Credentials:
        try:
            return self._credentials()
        except ConfigurationError as error:
            raise InvalidCredentialsError(error) from None

    def reload_certificate(self) -> None:
        """Load the present content of the client certificate's file."""
        settings = self._settings
        if self._context is None:
            return
        try:
            load_client_certificate(self._context, settings.tls_cert_file, settings.tls_key_file)
        except ConfigurationError as error:
            log.warning(
                "could not reload the client certificate; the previous one stays in use",
                error=error,
            )

    def refused_error(self) -> AuthorizationError:
        """The error for a server that refuses the client's credentials."""
        reason, settings = self._refusal()
        return AuthorizationError(
            f"{self._settings.server_list} refused the credentials: {reason}", settings=settings
        )

    def too_long_error(self) -> ConfigurationError:
        """The error for a server that does not accept a CONNECT line of this length."""
        method = self._settings.auth_methods[:1]
        settings = ("user", "password") if method == ("user",) else method
        names = " and ".join(f"'{name}'" for name in settings) or "its options"
        return ConfigurationError(
            f"could not connect to {self._settings.server_list}: the CONNECT line, with {names}, "
            f"is longer than the server's max_control_line (by default 4,096 bytes); use shorter "
            f"credentials (a user JWT with fewer permissions), or raise max_control_line at the "
            f"servers",
            settings=settings,
        )

    def _refusal(self) -> tuple[str, tuple[str, ...]]:
        """The likely reason, and the settings that can change it."""
        settings = self._settings
        if not settings.auth_methods:
            besides = " beside the certificate in 'tls_cert_file'" if settings.tls_cert_file else ""
            names = ("credentials", "nkey_seed_file", "user", "password", "token")
            return (
                f"none are set{besides}; set 'credentials', 'nkey_seed_file', 'user' and "
                f"'password', or 'token'",
                ("tls_cert_file", *names) if besides else names,
            )
        method = settings.auth_methods[0]
        if method.startswith("credentials") and (expired := self._expired_at()):
            return f"the user JWT in '{method}' expired at {expired}", (method,)
        if method == "user":
            return "check 'user' and 'password'", ("user", "password")
        if method == "servers":
            return "check the user and password in the URLs of 'servers'", ("servers",)
        return f"check '{method}'", (method,)

    def _expired_at(self) -> str | None:
        try:
            expires = self._credentials().expires
        except ConfigurationError:
            return None
        if expires is None or expires > time.time():
            return None
        return datetime.fromtimestamp(expires, timezone.utc).isoformat()

    def redact(self, error: Exception) -> str:
        """The text of an error of another library, with this connection's secrets replaced."""
        settings = self._settings
        text = str(error) or type(error).__name__
        secrets = [settings.password, settings.token]
        for url in settings.servers:
            user_info = url.rpartition("@")[0].rpartition("://")[2]
            secrets += [*user_info.split(":"), *map(unquote, user_info.split(":"))]
        for secret in secrets:
            if secret and not secret.isspace():
                text = text.replace(secret, "***")
        return text


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
        return handshake_error(error, servers)

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
        else:
            must = "set if the server waits for the TLS handshake"
            if settings.tls_handshake_first:
                must = "left out if the server sends INFO first"
            reason = f"no response; 'tls_handshake_first' must be {must}"
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
