"""Credentials files and nkey seeds: their content, and the signature for the server's nonce.

A server with decentralised users sends a nonce in INFO. The client replies with the user's JWT,
which the operator's chain of keys signed, and with the nonce signed by the user's private nkey. The
key itself never leaves the client. A credentials file contains both, each between marker lines:

    -----BEGIN NATS USER JWT-----
    eyJ0eXAi…
    ------END NATS USER JWT------
    -----BEGIN USER NKEY SEED-----
    SUAM…
    ------END USER NKEY SEED------

The file is read again for each connection, so that the next reconnect uses a renewed file.
nats-py's own parser of these files is not used: a file without the marker line keeps it in an
endless loop.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from nats_stream_source.errors import ConfigurationError

_JWT = re.compile(r"BEGIN NATS USER JWT-+\s+([\w.=-]+)\s+-+END")
_SEED = re.compile(r"BEGIN USER NKEY SEED-+\s+(\w+)\s+-+END")
_BARE_SEED = re.compile(r"^\s*(SU[A-Z2-7]+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user's JWT and seed; neither is in the ``repr``."""

    jwt: str = field(repr=False)
    seed: str = field(repr=False)

    @classmethod
    def parse(cls, text: str, setting: str, path: str | None = None) -> Credentials:
        """From the content of a credentials file; ``setting`` and ``path`` are for the error.

        Raises:
            ConfigurationError: the JWT or the seed is missing, or the seed is invalid.
        """
        jwt, seed = _JWT.search(text), _SEED.search(text)
        missing = [name for name, match in (("user JWT", jwt), ("nkey seed", seed)) if not match]
        if jwt is None or seed is None:
            raise ConfigurationError(
                f"{_source(setting, path)} holds no {' and no '.join(missing)}; it must be a whole "
                f"credentials file as `nsc generate creds` writes it, with its BEGIN and END lines",
                settings=(setting,),
            )
        return cls(jwt[1], validate_seed(seed[1], setting, path))

    @property
    def expires(self) -> int | None:
        """Expiry of the JWT in seconds since 1970; None without expiry, or if it is unreadable."""
        try:
            body = self.jwt.split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
            return int(claims["exp"])
        except (IndexError, KeyError, TypeError, ValueError):
            return None


def validate_seed(seed: str, setting: str, path: str | None) -> str:
    """Return ``seed`` if it is a user's nkey seed; raise ConfigurationError otherwise."""
    import nkeys  # type: ignore[import-untyped]

    try:
        prefix, raw = nkeys.decode_seed(seed.encode())
        valid = prefix == nkeys.PREFIX_BYTE_USER and len(raw) == 32
    except (nkeys.NkeysError, binascii.Error, ValueError, IndexError):
        valid = False
    if not valid:
        raise ConfigurationError(
            f"{_source(setting, path)}: its seed is not a user's nkey seed (SU…)",
            settings=(setting,),
        )
    return seed


def parse_seed_file(text: str, setting: str, path: str) -> str:
    """The seed in the text of a seed file: bare, or between its marker lines.

    Raises:
        ConfigurationError: the file does not contain a valid seed.
    """
    match = _SEED.search(text) or _BARE_SEED.search(text)
    if match is None:
        raise ConfigurationError(
            f"{_source(setting, path)} holds no user's nkey seed (SU…)", settings=(setting,)
        )
    return validate_seed(match[1], setting, path)


def nonce_signer(seed: Callable[[], str]) -> Callable[[str], bytes]:
    """A function that signs a nonce with the seed that ``seed()`` returns at that time."""

    def sign(nonce: str) -> bytes:
        import nkeys

        return base64.b64encode(nkeys.from_seed(bytearray(seed().encode())).sign(nonce.encode()))

    return sign


def read_file(path: str, setting: str) -> str:
    """The text of the file that ``setting`` names.

    Raises:
        ConfigurationError: the file cannot be read. The error never contains its text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise file_error(path, setting, error) from None
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"could not read '{setting}': {path} is not a text file", settings=(setting,)
        ) from None


def file_error(path: str, setting: str, error: OSError) -> ConfigurationError:
    """The error for a file that cannot be read; each process reads the files of its own machine."""
    reason = error.strerror or type(error).__name__
    return ConfigurationError(
        f"could not read '{setting}': {path} cannot be read ({reason}); the file must be at the "
        f"same path on every machine that connects, and readable by the process",
        settings=(setting,),
    )


def _source(setting: str, path: str | None) -> str:
    return f"the value of '{setting}'" if path is None else f"invalid file of '{setting}': {path}"
