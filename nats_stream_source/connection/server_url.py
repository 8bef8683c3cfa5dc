"""The URL of a server, as NATS clients read it.

The scheme is in any case, and ``nats://`` without one; the port is 4222 except for websocket. User,
password, token and the zone of an IPv6 address are percent-encoded. A user without a password is a
token. A name that is not ASCII is encoded with IDNA 2003, and one that ends with a dot is absolute.
IDNA 2008 encodes a few letters in another way: with them, a name may be that of two hosts, of which
one would get the credentials, so it is refused. A comma separates URLs and is in none of them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from urllib.parse import unquote, urlsplit

from nats_stream_source.errors import ConfigurationError

WEBSOCKET = ("ws", "wss")
_SCHEMES = ("nats", "tls", *WEBSOCKET)
_DEFAULT_PORT = 4222
_AMBIGUOUS = frozenset("ßẞς\u200c\u200d")  # IDNA 2003 maps them to other letters, or drops them


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
        path: of a websocket.
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
            host = _host(parts.hostname or "")
            port = parts.port
        except ValueError:  # also UnicodeError: a label is empty or too long
            host, port = "", None
        if not host or port == 0 or scheme not in _SCHEMES:
            raise ConfigurationError(
                f"invalid value for 'servers': {without_credentials(url)!r} is not an address like "
                f"nats://host:4222",
                settings=("servers",),
            )
        if _AMBIGUOUS & set(unquote(parts.netloc)):
            raise ConfigurationError(
                f"invalid value for 'servers': the host of {without_credentials(url)!r} is another "
                f"one in IDNA 2003 than in IDNA 2008; write it in its xn-- form",
                settings=("servers",),
            )
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


def tls_name(host: str) -> str:
    """The name of ``host`` in its certificate: without the final dot, or the zone of an address."""
    return host.rstrip(".").partition("%")[0]


def _host(name: str) -> str:
    host = unquote(name).encode("idna").decode()
    # Resolvers that read /etc/hosts do not find `localhost.`.
    if host.count(".") == 1:
        host = host.rstrip(".")
    with contextlib.suppress(ValueError):  # not an IPv6 address
        host = str(IPv6Address(host).ipv4_mapped or host)
    return f"[{host}]" if ":" in host else host


def scheme_of(url: str) -> str:
    """The scheme in lower case; also of a URL that is invalid otherwise."""
    scheme, separator, _ = url.strip().partition("://")
    return scheme.lower() if separator else "nats"


def without_credentials(url: str) -> str:
    """The URL for messages; also of a URL that is invalid otherwise."""
    scheme = scheme_of(url).rpartition("@")[2]  # of "user:password@nats://host"
    return f"{scheme}://{_split(url)[2]}"


def _split(url: str) -> tuple[str, str, str]:
    """User information, ``@`` or nothing, and the rest.

    Not by urlsplit: it may not be able to parse the URL, whose errors must not contain a password.
    """
    url = url.strip()
    scheme, separator, rest = url.partition("://")
    return (rest if separator else scheme).rpartition("@")
