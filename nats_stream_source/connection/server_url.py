"""The URL of a server, as NATS clients read it.

The scheme is in any case, and ``nats://`` without one; the port is 4222 except for websocket. User,
password, token and the zone of an IPv6 address are percent-encoded. A user without a password is a
token. A name that ends with a dot is absolute, and one that is not ASCII is refused: IDNA 2003 and
2008 encode a few letters in different ways, so that another host would get the credentials. A comma
separates URLs and is in none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from nats_stream_source.errors import ConfigurationError

WEBSOCKET = ("ws", "wss")
_SCHEMES = ("nats", "tls", *WEBSOCKET)
_DEFAULT_PORT = 4222


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
