"""Authentication: the settings that identify the client, as arguments of nats-py's ``connect``.

The files are read again for every attempt to connect, so that the next reconnect uses a renewed
file (a short-lived JWT, a client certificate).
"""

from __future__ import annotations

import importlib.util
import ssl
import time
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote

import nats.errors

from nats_stream_source.connection.credentials import (
    Credentials,
    nonce_signer,
    parse_seed_file,
    read_file,
)
from nats_stream_source.connection.settings import ConnectionSettings
from nats_stream_source.connection.tls import load_client_certificate, make_context
from nats_stream_source.errors import AuthorizationError, ConfigurationError
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
            return (
                f"none are set{besides}; set 'credentials', 'nkey_seed_file', 'user' and "
                f"'password', or 'token'",
                ("tls_cert_file", "credentials", "nkey_seed_file", "user", "password", "token")
                if besides
                else ("credentials", "nkey_seed_file", "user", "password", "token"),
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
