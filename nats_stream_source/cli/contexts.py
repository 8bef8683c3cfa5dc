"""Contexts of the ``nats`` command: named connection settings in JSON files.

``nats context add`` writes ``nats/context/NAME.json`` below ``$XDG_CONFIG_HOME`` (default
``~/.config``), and ``nats context select`` writes the name of the selected context to
``nats/context.txt``. :func:`read_context` returns the fields of a file as options of the
connection; unknown fields are ignored. As in the package ``natscontext`` of jsm.go:

- paths may start with ``~`` or ``file://`` and contain environment variables;
- a password, a token, a credentials file, a JWT and a seed may be a reference: ``env://NAME``, or
  ``data:;base64,…`` with the value itself. References to ``op://`` and ``nsc://`` require other
  programs and are refused;
- of several authentication methods the first one is used: a user, a credentials file, an nkey, a
  JWT with its seed, a token.

No error contains the value of a field.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nats_stream_source.errors import OptionError

_PATHS = {"cert": "tlsCertFile", "key": "tlsKeyFile", "ca": "tlsCaFile"}
_TEXTS = {
    "inbox_prefix": "inboxPrefix",
    "jetstream_domain": "domain",
    "jetstream_api_prefix": "apiPrefix",
}
# Without them the connection would take another way, or authenticate as another user.
_UNSUPPORTED = ("nsc", "socks_proxy", "windows_cert_store")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):", re.IGNORECASE)
_CREDENTIALS = """-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------
-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


class ContextError(OptionError):
    """A context is missing, is not valid, or has a field that is not supported."""


@dataclass(frozen=True, slots=True)
class Value:
    """The value of an option.

    Attributes:
        text: the value as Spark would pass it.
        origin: the place that the user can change: a flag, a variable, a field of a context.
    """

    text: str
    origin: str


def selected_context(environment: Mapping[str, str]) -> str | None:
    """The name of the selected context; None if no context is selected."""
    try:
        text = (_directory(environment) / "context.txt").read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text.strip() or None


def read_context(name: str, environment: Mapping[str, str]) -> dict[str, Value]:
    """The options of the connection that a context sets, by their names.

    ``servers`` may contain a user and a password.

    Args:
        name: the context's name, or the path of its file if it ends with ``.json``.

    Raises:
        ContextError: the context does not exist, is not valid, or requires an unsupported field.
    """
    path = Path(name).expanduser()
    if not (name.endswith(".json") and path.is_file()):
        if not name or "/" in name or "\\" in name or ".." in name:
            raise ContextError(f"invalid name of a context: {name!r}")
        path = _directory(environment) / "context" / f"{name}.json"
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        known = sorted(file.stem for file in path.parent.glob("*.json"))
        listed = (
            f"the contexts are {', '.join(known)}" if known else "the directory has no contexts"
        )
        raise ContextError(
            f"could not read context {name!r}: {path} does not exist; {listed}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise ContextError(f"could not read context {name!r}: {path}: {reason}") from None
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ContextError(f"could not read context {name!r}: {path} is not a JSON object")
    return _Reader(name, fields, environment).options()


def _directory(environment: Mapping[str, str]) -> Path:
    home = environment.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "nats"


class _Reader:
    """Converts the fields of one context."""

    def __init__(
        self, name: str, fields: Mapping[str, object], environment: Mapping[str, str]
    ) -> None:
        self._name = name
        self._fields = fields
        self._environment = environment

    def options(self) -> dict[str, Value]:
        for field in _UNSUPPORTED:
            if self._fields.get(field):
                raise self._error(field, "is not supported")
        values = self._authentication()
        if url := self._text("url"):
            values["servers"] = self._value("url", url)
        for field, option in _PATHS.items():
            if reference := self._text(field):
                values[option] = self._value(field, self._path(field, reference))
        for field, option in _TEXTS.items():
            if text := self._text(field):
                values[option] = self._value(field, text)
        if self._fields.get("tls_first"):
            values["tlsHandshakeFirst"] = self._value("tls_first", "true")
        return values

    def _authentication(self) -> dict[str, Value]:
        if user := self._text("user"):
            values = {"user": self._value("user", user)}
            if password := self._text("password"):
                resolved = self._resolve("password", password)
                values["password"] = self._value("password", resolved)
            return values
        if credentials := self._text("creds"):
            if _scheme(credentials) in ("env", "data"):
                content = self._resolve("creds", credentials)
                return {"credentialsContent": self._value("creds", content)}
            return {"credentials": self._value("creds", self._path("creds", credentials))}
        if nkey := self._text("nkey"):
            return {"nkeySeedFile": self._value("nkey", self._path("nkey", nkey))}
        if jwt := self._text("user_jwt"):
            seed = self._text("user_seed")
            if not seed:
                raise self._error("user_jwt", "requires the field 'user_seed'")
            content = _CREDENTIALS.format(
                jwt=self._resolve("user_jwt", jwt), seed=self._resolve("user_seed", seed)
            )
            return {"credentialsContent": self._value("user_jwt", content)}
        if token := self._text("token"):
            return {"token": self._value("token", self._resolve("token", token))}
        return {}

    def _text(self, field: str) -> str | None:
        text = self._fields.get(field)
        if text is not None and not isinstance(text, str):
            raise self._error(field, "must be a string")
        return text or None

    def _path(self, field: str, reference: str) -> str:
        if _scheme(reference) in ("env", "data", "op", "nsc"):
            raise self._error(field, "must be the path of a file")
        path = reference[7:] if reference.lower().startswith("file://") else reference
        return os.path.expanduser(os.path.expandvars(path))

    def _resolve(self, field: str, reference: str) -> str:
        """The value that a field contains or refers to."""
        scheme, rest = _scheme(reference), reference.partition(":")[2]
        if scheme == "env":
            value = self._environment.get(rest.removeprefix("//"))
            if not value:
                raise self._error(field, "refers to an environment variable that is not set")
            return value.rstrip("\r\n")
        if scheme == "data":
            header, _, payload = rest.partition(",")
            if "base64" not in header.split(";"):
                raise self._error(field, "is a data: reference, which must have base64 encoding")
            try:
                return base64.b64decode(payload, validate=True).decode().rstrip("\r\n")
            except (binascii.Error, UnicodeDecodeError):
                raise self._error(field, "is a data: reference without valid base64") from None
        if scheme == "file":
            try:
                return Path(self._path(field, reference)).read_text("utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError):
                raise self._error(field, "refers to a file that cannot be read") from None
        if scheme in ("op", "nsc"):
            raise self._error(field, f"refers to {scheme}://, which is not supported")
        return reference

    def _value(self, field: str, text: str) -> Value:
        # Without quotes, which mark the names of settings in errors.
        return Value(text, f"field {field} of context {self._name}")

    def _error(self, field: str, problem: str) -> ContextError:
        return ContextError(f"could not use context {self._name!r}: field {field!r} {problem}")


def _scheme(reference: str) -> str:
    match = _SCHEME.match(reference)
    return match[1].lower() if match else ""
