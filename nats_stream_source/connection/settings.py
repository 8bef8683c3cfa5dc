"""The settings of a connection: servers, authentication, TLS, prefixes, limits; URLs. Pure.

A connection uses one authentication method: ``credentials`` (or their content), an nkey seed, a
user and a password, a token, or what a URL contains. A client certificate may be used in addition,
or alone if the server maps certificates to users.

``tls://`` or ``wss://`` in a URL and every TLS setting require TLS: the client then refuses a
server that does not encrypt. Otherwise the client uses TLS if the server requires it.

*The URL of a server* is read as NATS clients read it. The scheme is in any case, and ``nats://``
without one; the port is 4222 except for websocket. User, password, token and the zone of an IPv6
address are percent-encoded. A user without a password is a token. A name that ends with a dot is
absolute, and one that is not ASCII is refused: IDNA 2003 and 2008 encode a few letters in different
ways, so that another host would get the credentials. A comma separates URLs and is in none of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from nats_stream_source.errors import ConfigurationError, InvalidNameError, NameTooLongError

WEBSOCKET = ("ws", "wss")
_SCHEMES = ("nats", "tls", *WEBSOCKET)
_DEFAULT_PORT = 4222

DEFAULT_API_PREFIX = "$JS.API"
"""First tokens of all JetStream API subjects without a prefix or a domain (ADR-19)."""

PONG_TIMEOUT = 5.0
"""Seconds without a PONG after which a server counts as lost."""

_REST_OF_REQUEST = 200  # bytes beside the prefixes: an operation, short names, the reply's token
_MAX_CONSUMER_PREFIX = 200  # bytes; servers accept a name of 255, and a token follows the prefix
_SHOWN = 100  # characters of a prefix in an error


@dataclass(frozen=True, slots=True)
class UserInfo:
    """What a URL has before ``@``: a user and a password, or a token."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, text: str) -> UserInfo:
        """Decode ``user:password`` or ``token``."""
        user, separator, password = text.partition(":")
        if separator:
            return cls(unquote(user), unquote(password))
        return cls(token=unquote(user))


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """One server.

    Attributes:
        scheme: in lower case.
        address: ``host:port``; an IPv6 address is in brackets, its zone is decoded.
        path: the path of a websocket.
        user_info: None for a URL without it.
    """

    scheme: str
    address: str
    path: str = ""
    user_info: UserInfo | None = None

    @classmethod
    def parse(cls, url: str) -> ServerUrl:
        """Parse a URL; ConfigurationError if it is not the address of a server."""
        if "," in url:  # not the text: a part of it may be a password
            raise ConfigurationError(
                "invalid value for 'servers': a URL contains a comma; give each server as a URL of "
                "its own, and write a comma of a password as %2C",
                settings=("servers",),
            )
        scheme = scheme_of(url)
        user_info, separator, address = _split(url)
        try:
            parts = urlsplit(f"//{address}")
            host = unquote(parts.hostname or "")
            host.encode("idna")
            port = parts.port
        except ValueError:  # also UnicodeError: a label is empty or too long
            host, port = "", None
        if not host or port == 0 or scheme not in _SCHEMES:
            raise ConfigurationError(
                f"invalid value for 'servers': {_shown(url)!r} is not an address like "
                f"nats://host:4222",
                settings=("servers",),
            )
        if not host.isascii():
            raise ConfigurationError(
                f"invalid value for 'servers': the host of {without_credentials(url)!r} is not "
                f"ASCII; write it in its xn-- form",
                settings=("servers",),
            )
        if host.count(".") == 1:
            host = host.rstrip(".")  # resolvers that read /etc/hosts do not find `localhost.`
        host = f"[{host}]" if ":" in host else host
        if port is None and scheme not in WEBSOCKET:
            port = _DEFAULT_PORT
        path = f"{parts.path}{'?' if parts.query else ''}{parts.query}"
        return cls(
            scheme,
            host if port is None else f"{host}:{port}",
            path if scheme in WEBSOCKET else "",
            UserInfo.parse(user_info) if separator else None,
        )

    def __str__(self) -> str:
        """The URL without user information."""
        return f"{self.scheme}://{self.address}{self.path}"


def split_list(text: str) -> tuple[str, ...]:
    """The URLs of a list that is separated by commas; empty elements are skipped.

    Raises:
        ConfigurationError: some URLs have user information and others do not. The error does not
            contain the text: a password with a comma would be cut into two elements.
    """
    urls = tuple(url for element in text.split(",") if (url := element.strip()))
    if len({"@" in url for url in urls}) > 1:
        raise ConfigurationError(
            "invalid value for 'servers': some URLs of the list have user information and others "
            "do not; give it to each of them, and write a comma of a password as %2C",
            settings=("servers",),
        )
    return urls


def tls_name(host: str) -> str:
    """The name of ``host`` in its certificate: without the final dot, or the zone of an address."""
    return host.rstrip(".").partition("%")[0]


def scheme_of(url: str) -> str:
    """The scheme in lower case; also of a URL that is invalid otherwise."""
    scheme, separator, _ = url.strip().partition("://")
    return scheme.lower() if separator else "nats"


def without_credentials(url: str) -> str:
    """The URL for messages; also of a URL that is invalid otherwise."""
    scheme = scheme_of(url).rpartition("@")[2]  # of "user:password@nats://host"
    return f"{scheme}://{_split(url)[2]}"


def _shown(url: str) -> str:
    """An invalid URL for its error; without what is not a port, which may be a password."""
    shown = without_credentials(url)
    host, _, port = shown.rpartition(":")
    return shown if port.startswith(("//", "]")) or port.isdigit() else f"{host}:…"


def _split(url: str) -> tuple[str, str, str]:
    """User information, ``@`` or nothing, and the rest.

    Not by urlsplit: it may not be able to parse the URL, whose errors must not contain a password.
    An ``@`` in the path of a websocket is a part of the path.
    """
    url = url.strip()
    scheme, separator, rest = url.partition("://")
    if not separator:
        return scheme.rpartition("@")
    path = rest.find("/") if scheme.lower() in WEBSOCKET else -1
    end = len(rest) if path < 0 else path
    user_info, at, address = rest[:end].rpartition("@")
    return user_info, at, address + rest[end:]


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
