"""Who a connection is: what ``ConnectionSettings`` say of it, in the form that nats-py takes.

Files are read for every attempt to connect, so that what was renewed (a short-lived JWT, a client's
certificate) counts at the next reconnect.
"""

from __future__ import annotations

import importlib.util
import ssl
import time
from datetime import datetime, timezone
from typing import Any

import nats.errors

from nats_stream_source.errors import AuthorizationError, ConfigurationError
from nats_stream_source.jetstream.credentials import (
    Credentials,
    read_text,
    seed_in,
    signer,
)
from nats_stream_source.jetstream.settings import ConnectionSettings
from nats_stream_source.jetstream.tls import load_identity, make_context
from nats_stream_source.logs import field_logger

log = field_logger(__name__)


class UnusableError(nats.errors.Error):
    """A file that was sound cannot be used any more; nats-py goes on trying to reconnect.

    ``reason`` is the named error. It does not go to nats-py itself, which an error that it does not
    know would stop without a sign.
    """

    def __init__(self, reason: ConfigurationError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Identity:
    """What proves the client to the server, and the server to the client."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._context: ssl.SSLContext | None = None

    def options(self) -> dict[str, Any]:
        """Arguments of nats-py's ``connect``.

        Raises:
            ConfigurationError: contradictions; a file that is missing, unreadable or not what it
                should be; websocket without the package for it.
        """
        settings = self._settings
        settings.check()
        if settings.websocket and importlib.util.find_spec("aiohttp") is None:
            raise ConfigurationError(
                "option 'servers': websocket needs the package aiohttp, which this Python does "
                "not have: pip install 'nats-stream-source[websocket]'"
            )
        options: dict[str, Any] = self._proof()
        if settings.encrypted:
            self._context = make_context(
                settings.tls_ca_file, settings.tls_cert_file, settings.tls_key_file
            )
            options["tls"] = self._context
            options["tls_handshake_first"] = settings.tls_handshake_first
        return options

    def _proof(self) -> dict[str, Any]:
        settings = self._settings
        if settings.credentials or settings.credentials_content:
            self._credentials()  # now, so that what is wrong with them is said at once
            return {
                "user_jwt_cb": lambda: self._present().jwt.encode(),
                "signature_cb": signer(lambda: self._present().seed),
            }
        if settings.nkey_seed_file:
            text = read_text(settings.nkey_seed_file, "nkeySeedFile")
            origin = f"option 'nkeySeedFile': {settings.nkey_seed_file}"
            return {"nkeys_seed_str": seed_in(text, origin)}
        return {"user": settings.user, "password": settings.password, "token": settings.token}

    def _credentials(self) -> Credentials:
        settings = self._settings
        if settings.credentials_content:
            return Credentials.parse(
                settings.credentials_content, "the value of option 'credentialsContent'"
            )
        assert settings.credentials is not None
        text = read_text(settings.credentials, "credentials")
        return Credentials.parse(text, f"option 'credentials': {settings.credentials}")

    def _present(self) -> Credentials:
        try:
            return self._credentials()
        except ConfigurationError as error:
            raise UnusableError(error) from None

    def renew(self) -> None:
        """Take the client's certificate as its file has it now."""
        settings = self._settings
        if self._context is None:
            return
        try:
            load_identity(self._context, settings.tls_cert_file, settings.tls_key_file)
        except ConfigurationError as error:
            log.warning("the client's certificate stays as it was", error=error)

    def refused(self) -> AuthorizationError:
        """The error for a server that does not accept what it was shown."""
        settings = self._settings
        return AuthorizationError(f"{settings.places} refused the credentials: {self._doubt()}")

    def _doubt(self) -> str:
        settings = self._settings
        if not settings.proof:
            besides = " beside the certificate in 'tlsCertFile'" if settings.tls_cert_file else ""
            return (
                f"none are set{besides}; see the options 'credentials', 'nkeySeedFile', 'user' and "
                f"'password', and 'token'"
            )
        way = settings.proof[0]
        if way.startswith("credentials") and (ended := self._ended()):
            return f"the user JWT in the option {way!r} expired at {ended}"
        return {
            "user": "check the options 'user' and 'password'",
            "servers": "check what the addresses carry before the '@'",
        }.get(way, f"check the option {way!r}")

    def _ended(self) -> str | None:
        try:
            expires = self._credentials().expires
        except ConfigurationError:
            return None
        if expires is None or expires > time.time():
            return None
        return datetime.fromtimestamp(expires, timezone.utc).isoformat()

    def scrubbed(self, error: Exception) -> str:
        """The text of an error from elsewhere, without any of this connection's secrets."""
        settings = self._settings
        text = str(error) or type(error).__name__
        secrets = [settings.password, settings.token]
        for url in settings.servers:
            secrets += url.partition("://")[2].rpartition("@")[0].split(":")
        for secret in secrets:
            if secret:
                text = text.replace(secret, "***")
        return text
