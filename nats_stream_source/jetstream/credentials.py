"""Credentials files and nkey seeds: what is in them, and how they answer the server.

A server with decentralised users sends a nonce in its greeting. The client answers with the user's
JWT, signed by the operator's chain, and with the nonce signed by the user's private nkey; the key
itself never leaves the client. A credentials file holds both, each between marker lines:

    -----BEGIN NATS USER JWT-----
    eyJ0eXAi…
    ------END NATS USER JWT------
    -----BEGIN USER NKEY SEED-----
    SUAM…
    ------END USER NKEY SEED------

A file is read when it is needed, once for each connection, so that a file that was renewed counts
at the next reconnect. nats-py's own reader of these files is not used: a file without the marker
line keeps it in an endless loop.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    def parse(cls, text: str, origin: str) -> Credentials:
        """From the text of a credentials file.

        Args:
            origin: what the text is, for the error: ``option 'credentialsContent'``.

        Raises:
            ConfigurationError: it has no JWT, no seed, or a seed that is none.
        """
        jwt, seed = _JWT.search(text), _SEED.search(text)
        missing = [what for what, found in (("user JWT", jwt), ("nkey seed", seed)) if not found]
        if jwt is None or seed is None:
            raise ConfigurationError(
                f"{origin} holds no {' and no '.join(missing)}: it must be a whole credentials "
                f"file as `nsc generate creds` writes it, with its BEGIN and END lines"
            )
        return cls(jwt[1], check_seed(seed[1], origin))

    @property
    def expires(self) -> int | None:
        """When the JWT expires, in seconds since 1970; None if never, or if it is unreadable."""
        try:
            body = self.jwt.split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
            return int(claims["exp"])
        except (IndexError, KeyError, TypeError, ValueError):
            return None


def check_seed(seed: str, origin: str) -> str:
    """Return ``seed`` if it is a user's nkey seed; ConfigurationError if not."""
    nkeys = _nkeys(origin)
    try:
        prefix, raw = nkeys.decode_seed(seed.encode())
        sound = prefix == nkeys.PREFIX_BYTE_USER and len(raw) == 32
    except (nkeys.NkeysError, binascii.Error, ValueError, IndexError):
        sound = False
    if not sound:
        raise ConfigurationError(f"{origin}: its seed is not a user's nkey seed (SU…)")
    return seed


def seed_in(text: str, origin: str) -> str:
    """The seed in the text of a seed file: bare, or between its marker lines.

    Raises:
        ConfigurationError: there is none.
    """
    found = _SEED.search(text) or _BARE_SEED.search(text)
    if found is None:
        raise ConfigurationError(f"{origin} holds no user's nkey seed (SU…)")
    return check_seed(found[1], origin)


def signer(seed: Callable[[], str]) -> Callable[[str], bytes]:
    """A function that signs a nonce with the seed that ``seed()`` returns then."""

    def sign(nonce: str) -> bytes:
        pair = _nkeys("the nkey").from_seed(bytearray(seed().encode()))
        return base64.b64encode(pair.sign(nonce.encode()))

    return sign


def read_text(path: str, option: str) -> str:
    """The text of the file that ``option`` names.

    Raises:
        ConfigurationError: it cannot be read. Its text is never in the error.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(path, option, error) from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"option {option!r}: {path} is not a text file") from None


def unreadable(path: str, option: str, error: OSError) -> ConfigurationError:
    """The error for a file that cannot be read; an executor reads its own machine's files."""
    reason = error.strerror or type(error).__name__
    return ConfigurationError(
        f"option {option!r}: {path} cannot be read ({reason}); the file must be on every machine "
        f"of the cluster, at the same path, and readable by Spark's user"
    )


def _nkeys(origin: str) -> Any:
    # Not at the top: where the package is shipped without its dependencies, all else works.
    try:
        import nkeys  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigurationError(
            f"{origin} needs the package nkeys, which this Python does not have: pip install "
            f"'nats-py[nkeys]'"
        ) from error
    return nkeys
