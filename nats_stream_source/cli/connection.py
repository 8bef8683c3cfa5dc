"""Where the options of the connection come from: flags, variables, contexts, defaults.

An option is taken from the first of these that sets it, as the ``nats`` command does:

1. its flag;
2. its environment variable, ``NATS_`` and the name, or the variable of the ``nats`` command:
   ``NATS_URL``, ``NATS_CREDS``, …;
3. the context (``contexts``) that ``--context`` or ``NATS_CONTEXT`` names, else the selected one;
4. its default; for ``servers`` that is ``nats://127.0.0.1:4222``.

The authentication method is one option in this sense: a user from a variable replaces the
credentials file of a context. Variables and contexts may have the user and the password in the URL,
a flag must not: other users of the machine can read a command line.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict

from nats_stream_source.cli.contexts import (
    ContextError,
    Value,
    read_context,
    selected_context,
)
from nats_stream_source.cli.flags import DEFAULT_SERVER, flag, given, variable
from nats_stream_source.connection.server_url import ServerUrl, UserInfo
from nats_stream_source.errors import ConfigurationError, OptionError
from nats_stream_source.options import CONNECTION

# Variables of the `nats` command with another name than NATS_ and the option.
_NATS_VARIABLES = {
    "servers": "NATS_URL",
    "credentials": "NATS_CREDS",
    "nkeySeedFile": "NATS_NKEY",
    "tlsCaFile": "NATS_CA",
    "tlsCertFile": "NATS_CERT",
    "tlsKeyFile": "NATS_KEY",
}
# Groups of which one member is used: that of the flags, else of the variables, else of the context.
_EXCLUSIVE = (
    (
        ("user", "password"),
        ("token",),
        ("credentials",),
        ("credentialsContent",),
        ("nkeySeedFile",),
    ),
    (("domain",), ("apiPrefix",)),
)
# Any word that Spark's redaction recognises, so that the parser accepts the content of a file.
_REDACTION_MARK = "\n# secret"


def connection(
    arguments: argparse.Namespace,
    environment: Mapping[str, str] = os.environ,
    *,
    default_server: bool = True,
) -> dict[str, str]:
    """The options of the connection.

    The places of their values become ``arguments.origins``, for :func:`error_text`.

    Args:
        default_server: whether ``servers`` has its default if no server is configured.

    Raises:
        ContextError: a context is missing or not valid.
        OptionError: a URL on the command line has a password; a URL is not valid.
    """
    flags = {name: Value(text, flag(name)) for name, text in given(arguments, CONNECTION).items()}
    if "@" in (flags["servers"].text if "servers" in flags else ""):
        raise OptionError(
            "--servers contains a user or a token, which other users of the machine can read; set "
            "NATS_URL instead, or --user and --password -"
        )
    variables, context = _variables(environment), _context(arguments, environment)
    values: dict[str, Value] = {}
    for layer in (flags, variables, context):
        _add_layer(values, layer)
    arguments.origins = {name: value.origin for name, value in values.items()}
    if default_server and "servers" not in values:
        values["servers"] = Value(DEFAULT_SERVER, "")
        arguments.origins["servers"] = "--servers, NATS_URL or a context"
    if (content := values.get("credentialsContent")) is not None:
        values["credentialsContent"] = Value(content.text + _REDACTION_MARK, content.origin)
    return {name: value.text for name, value in values.items()}


def _variables(environment: Mapping[str, str]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for option in CONNECTION:
        for name in (variable(option.name), _NATS_VARIABLES.get(option.name, "")):
            if (text := environment.get(name)) and option.name not in values:
                values[option.name] = Value(text, name)
    return values


def _context(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Mapping[str, Value]:
    if arguments.no_context:
        return {}
    if name := arguments.context or environment.get("NATS_CONTEXT"):
        return read_context(name, environment)
    if (name := selected_context(environment)) is None:
        return {}
    try:
        return read_context(name, environment)
    except ContextError as error:
        raise ContextError(
            f"{error}; it is the selected context: --no-context ignores it"
        ) from None


def _add_layer(values: dict[str, Value], layer: Mapping[str, Value]) -> None:
    """Add the values of a source that the sources before it did not set."""
    layer = dict(layer)
    if "servers" in values:
        layer.pop("servers", None)
    elif "servers" in layer:
        authentication = _EXCLUSIVE[0]
        layer["servers"], in_url = _split_url(layer["servers"])
        if in_url:  # it replaces the method beside it, as in nats.go
            for name in (name for method in authentication for name in method):
                layer.pop(name, None)
            layer.update(in_url)
    for group in _EXCLUSIVE:
        used = {members for members in group if values.keys() & set(members)}
        for members in group:
            if used and members not in used:
                for name in members:
                    layer.pop(name, None)
    for name, value in layer.items():
        values.setdefault(name, value)


def _split_url(servers: Value) -> tuple[Value, dict[str, Value]]:
    """The URLs without authentication, and the options that authenticate."""
    if "@" not in servers.text:
        return servers, {}
    urls: list[str] = []
    found: set[UserInfo | None] = set()
    for url in servers.text.split(","):
        try:
            server = ServerUrl.parse(url)
        except ConfigurationError:
            # Not the text: a part of it may belong to the password.
            raise OptionError(
                f"invalid value for {servers.origin}: it is not a list of URLs such as "
                f"nats://user:password@host:4222; percent-encode the reserved characters of the "
                f"password"
            ) from None
        urls.append(str(server))
        found.add(server.user_info)
    if len(found) > 1:
        raise OptionError(
            f"invalid value for {servers.origin}: its URLs have different users; give each URL the "
            f"same user and password"
        )
    secrets = asdict(found.pop() or UserInfo())
    return Value(",".join(urls), servers.origin), {
        name: Value(secret, servers.origin)
        for name, secret in secrets.items()
        if secret is not None
    }
