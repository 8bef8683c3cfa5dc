"""The settings of a connection: servers, authentication, TLS, prefixes, limits. Pure.

A connection uses one authentication method: ``credentials`` (or their content), an nkey seed, a
user and a password, a token, or what a URL contains. A client certificate may be used in addition,
or alone if the server maps certificates to users.

``tls://`` or ``wss://`` in a URL and every TLS setting require TLS: the client then refuses a
server that does not encrypt. Otherwise the client uses TLS if the server requires it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nats_stream_source.connection.server_url import (
    WEBSOCKET,
    ServerUrl,
    scheme_of,
    without_credentials,
)
from nats_stream_source.errors import ConfigurationError, InvalidNameError, NameTooLongError

DEFAULT_API_PREFIX = "$JS.API"
"""First tokens of all JetStream API subjects without a prefix or a domain (ADR-19)."""

_REST_OF_REQUEST = 200  # bytes beside the prefixes: an operation, short names, the reply's token
_MAX_CONSUMER_PREFIX = 200  # bytes; servers accept a name of 255, and a token follows the prefix
_SHOWN = 100  # characters of a prefix in an error


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """The settings of a connection. Hashable; secrets are not in the ``repr``.

    Attributes:
        servers: URLs, ``nats://host:port``; a URL may contain ``user:password@`` or ``token@``,
            percent-encoded.
        credentials: path of a credentials file (user JWT and nkey seed).
        credentials_content: the content of a credentials file, instead of its path.
        nkey_seed_file: path of a file with a user's nkey seed.
        tls_ca_file: path of the PEM certificates to trust, instead of the system's.
        tls_cert_file, tls_key_file: paths of the client's PEM certificate and its private key.
        tls_handshake_first: start the TLS handshake before the server sends INFO.
        api_prefix: prefix of all JetStream API subjects (ADR-19), see ``subjects.api_prefix``.
        inbox_prefix: prefix of the subjects that this client subscribes to.
        consumer_prefix: prefix of the names of the consumers that this client creates.
        connect_timeout, request_timeout: seconds.
        max_control_line: maximum length in bytes of a line, with its subject; as at the servers.
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
    max_control_line: int = 4096
    credentials: str | None = None
    credentials_content: str | None = field(default=None, repr=False)
    nkey_seed_file: str | None = None
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_handshake_first: bool = False

    @property
    def server_urls(self) -> tuple[ServerUrl, ...]:
        """The parsed URLs; ConfigurationError if one is invalid."""
        return tuple(ServerUrl.parse(url) for url in self.servers)

    @property
    def server_list(self) -> str:
        """The URLs without user, password and token, for messages."""
        return ", ".join(without_credentials(url) for url in self.servers)

    @property
    def uses_websocket(self) -> bool:
        """Whether the client connects through websocket."""
        return any(scheme_of(url) in WEBSOCKET for url in self.servers)

    @property
    def requires_tls(self) -> bool:
        """Whether the client refuses a server without TLS."""
        return bool(self._tls_settings) or any(
            scheme_of(url) in ("tls", "wss") for url in self.servers
        )

    @property
    def auth_methods(self) -> tuple[str, ...]:
        """The names of the settings that authenticate the client; empty if none is set."""
        names = ("credentials", "credentials_content", "nkey_seed_file", "user", "token")
        in_urls = ("servers",) if any("@" in url for url in self.servers) else ()
        return (*(name for name in names if getattr(self, name)), *in_urls)

    @property
    def _tls_settings(self) -> tuple[str, ...]:
        names = ("tls_ca_file", "tls_cert_file", "tls_key_file", "tls_handshake_first")
        return tuple(name for name in names if getattr(self, name))

    def validate(self) -> None:
        """Raise ConfigurationError if a setting is invalid or two settings exclude each other."""
        self._validate_prefixes()
        schemes = {url.scheme for url in self.server_urls}
        if len({scheme in WEBSOCKET for scheme in schemes}) > 1:
            raise ConfigurationError(
                "'servers' must be either all websocket URLs or all other URLs: they do not mix",
                settings=("servers",),
            )
        # A password may be empty, a user may not.
        alone = (self.user is None) != (self.password is None)
        if alone or (self.password and not self.user):
            raise ConfigurationError(
                "'user' and 'password' belong together: set both or neither",
                settings=("user", "password"),
            )
        if len(self.auth_methods) > 1:
            one, other = self.auth_methods[:2]
            raise ConfigurationError(
                f"'{one}' and '{other}' exclude each other: they are two authentication methods; "
                f"configure exactly one",
                settings=(one, other),
            )
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigurationError(
                "'tls_cert_file' and 'tls_key_file' belong together: set both or neither",
                settings=("tls_cert_file", "tls_key_file"),
            )
        if "ws" in schemes and self._tls_settings:
            name = self._tls_settings[0]
            raise ConfigurationError(
                f"'{name}' requires TLS, and a ws:// URL does not use TLS; use wss:// in 'servers'",
                settings=(name, "servers"),
            )
        if "wss" in schemes and self.tls_handshake_first:
            raise ConfigurationError(
                "'tls_handshake_first' is not for wss://, which always starts with the handshake",
                settings=("tls_handshake_first",),
            )

    def _validate_prefixes(self) -> None:
        # nats-py does not find the request of a reply whose inbox prefix is not ASCII.
        if not self.inbox_prefix.isascii() or not re.fullmatch(
            r"[^\s.*>]+(\.[^\s.*>]+)*", self.inbox_prefix
        ):
            raise InvalidNameError(
                f"'inbox_prefix' is {self.inbox_prefix[:_SHOWN]!r}, expected a subject: tokens of "
                f"ASCII characters separated by dots, without wildcards and white space",
                settings=("inbox_prefix",),
            )
        if not re.fullmatch(r"[^\s.*>/\\]+", self.consumer_prefix):
            raise InvalidNameError(
                f"'consumer_prefix' is {self.consumer_prefix[:_SHOWN]!r}, expected one token: no "
                f"dots, slashes, wildcards and white space",
                settings=("consumer_prefix",),
            )
        if (length := _bytes(self.consumer_prefix)) > _MAX_CONSUMER_PREFIX:
            raise NameTooLongError(
                f"'consumer_prefix' has {length:,} bytes, expected at most {_MAX_CONSUMER_PREFIX}",
                settings=("consumer_prefix",),
            )
        # Both are in the line of each request.
        most = self.max_control_line - _REST_OF_REQUEST
        inbox, api = _bytes(self.inbox_prefix), _bytes(self.api_prefix)
        if inbox + api > most:
            name = "inbox_prefix" if inbox > api else "api_prefix"
            raise NameTooLongError(
                f"'{name}' has {max(inbox, api):,} bytes, 'inbox_prefix' and 'api_prefix' together "
                f"{inbox + api:,}, expected at most {most:,} ('max_control_line' of "
                f"{self.max_control_line:,}); use a shorter '{name}'",
                settings=(name, "max_control_line"),
            )


def _bytes(text: str) -> int:
    return len(text.encode(errors="replace"))
