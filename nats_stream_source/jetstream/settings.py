"""What a connection is made from: servers, who asks, TLS, prefixes, limits. Pure.

One way to authenticate at a time: ``credentials`` (or their content), an nkey seed, a user and a
password, a token, or what a URL carries. A client's certificate may come on top, or be all there is
where the server maps certificates to users.

TLS is asked for by ``tls://`` or ``wss://`` in an address and by any TLS setting; then a server
that does not encrypt is refused. Without, it is used where the server demands it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from nats_stream_source.errors import ConfigurationError
from nats_stream_source.jetstream.subjects import DEFAULT_API_PREFIX

_WEBSOCKET = ("ws", "wss")


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Where the servers are and who asks. Hashable; secrets stay out of the ``repr``.

    Attributes:
        servers: URLs, ``nats://host:port``; a URL may carry ``user:password@``.
        credentials: path of a credentials file (user JWT and nkey seed).
        credentials_content: the text of one, instead.
        nkey_seed_file: path of a file with a user's nkey seed.
        tls_ca_file: path of the PEM certificates to trust, instead of the system's.
        tls_cert_file, tls_key_file: paths of the client's own PEM certificate and its key.
        tls_handshake_first: begin with the TLS handshake, before the server's greeting.
        api_prefix: of all JetStream API subjects (ADR-19), see ``subjects.api_prefix``.
        inbox_prefix: of the subjects that this client subscribes to.
        consumer_prefix: of the names of the consumers that it creates.
        connect_timeout, request_timeout: seconds.
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
    credentials: str | None = None
    credentials_content: str | None = field(default=None, repr=False)
    nkey_seed_file: str | None = None
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_handshake_first: bool = False

    @property
    def places(self) -> str:
        """The servers without user, password or token, for messages."""
        return ", ".join(_place(url) for url in self.servers)

    @property
    def websocket(self) -> bool:
        """Whether the servers are spoken to through websocket."""
        return any(url.startswith(("ws://", "wss://")) for url in self.servers)

    @property
    def encrypted(self) -> bool:
        """Whether a server without TLS is to be refused."""
        return bool(self._tls) or any(url.startswith(("tls://", "wss://")) for url in self.servers)

    @property
    def proof(self) -> tuple[str, ...]:
        """The names of the options that say who asks; empty if none does."""
        given = {
            "credentials": self.credentials,
            "credentialsContent": self.credentials_content,
            "nkeySeedFile": self.nkey_seed_file,
            "user": self.user,
            "token": self.token,
            "servers": any("@" in url for url in self.servers),
        }
        return tuple(name for name, value in given.items() if value)

    @property
    def _tls(self) -> tuple[str, ...]:
        given = {
            "tlsCaFile": self.tls_ca_file,
            "tlsCertFile": self.tls_cert_file,
            "tlsKeyFile": self.tls_key_file,
            "tlsHandshakeFirst": self.tls_handshake_first,
        }
        return tuple(name for name, value in given.items() if value)

    def check(self) -> None:
        """Raise ConfigurationError where the settings cannot be used, or contradict each other."""
        schemes = {_scheme(url) for url in self.servers}
        if len({scheme in _WEBSOCKET for scheme in schemes}) > 1:
            raise ConfigurationError("option 'servers': websocket and other addresses do not mix")
        if bool(self.user) != bool(self.password):
            raise ConfigurationError("options 'user' and 'password' belong together")
        if len(self.proof) > 1:
            one, other = self.proof[:2]
            raise ConfigurationError(
                f"options {one!r} and {other!r} exclude each other: they are two ways to "
                f"authenticate"
            )
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            raise ConfigurationError("options 'tlsCertFile' and 'tlsKeyFile' belong together")
        if "ws" in schemes and self._tls:
            raise ConfigurationError(
                f"option {self._tls[0]!r} asks for TLS, and a ws:// address has none: use wss://"
            )
        if "wss" in schemes and self.tls_handshake_first:
            raise ConfigurationError(
                "option 'tlsHandshakeFirst' is not for wss://, which always begins with it"
            )


def _scheme(url: str) -> str:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        sound = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        sound = False
    if not sound or parts.scheme not in ("nats", "tls", *_WEBSOCKET):
        raise ConfigurationError(
            f"option 'servers': {_place(url)!r} is not an address like nats://host:4222"
        )
    return parts.scheme


def _place(url: str) -> str:
    # Not through urlsplit's user and password: the url may be one that it cannot read.
    scheme, found, rest = url.partition("://")
    return f"{scheme if found else 'nats'}://{(rest if found else url).rpartition('@')[2]}"
