"""The options of the formats as flags; where those of the connection come from.

The flags are made from the tables of options: ``credentialsContent`` is ``--credentials-content``.
Other users of the machine can read a command line: with ``-`` as the value of a secret, the command
prompts for it without an echo, and a URL with a password is refused.

An option of the connection is taken from the first of these that sets it, as the ``nats`` command
does:

1. its flag;
2. its environment variable, ``NATS_`` and the name, or the variable of the ``nats`` command:
   ``NATS_URL``, ``NATS_CREDS``, …;
3. the context that ``--context`` or ``NATS_CONTEXT`` names, else the selected one;
4. its default; for ``servers`` that is ``nats://127.0.0.1:4222``.

The authentication method is one option in this sense: a user from a variable replaces the
credentials file of a context. Variables and contexts may have the user and the password in the URL,
a flag must not.

**Contexts.** ``nats context add`` writes ``nats/context/NAME.json`` below ``$XDG_CONFIG_HOME``
(default ``~/.config``), and ``nats context select`` writes the name of the selected context to
``nats/context.txt``. As in the package ``natscontext`` of jsm.go, paths may start with ``~`` or
``file://`` and contain variables, and a password or a token may be a reference ``env://NAME``.
Other references (``data:``, ``op://``, ``nsc://``) are refused, unknown fields are ignored. No
error contains the value of a field.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from nats_stream_source.connection.settings import ServerUrl, UserInfo
from nats_stream_source.errors import ConfigurationError, NatsSourceError, OptionError
from nats_stream_source.options import CONNECTION, KV, STREAM, Option
from nats_stream_source.options.table import names_of_settings, setting_of

DEFAULT_SERVER = "nats://127.0.0.1:4222"

_PROMPT = "-"
# The options beside those of the connection that have flags; a bucket has `startSequence` too.
KV_FLAGS, STREAM_FLAGS = (
    tuple(option for option in table if option.name in names)
    for table, names in (
        (KV, ("bucket", "keys", "keyCodec", "valueCodec", "onUndecodable")),
        (STREAM, ("stream", "subject", "filterSubjects", "startSequence")),
    )
)
_ALL_FLAGS = CONNECTION + KV_FLAGS + STREAM_FLAGS
_NAMES = {option.name for option in _ALL_FLAGS}
_QUOTED = r"'\w+'"
_OPTIONS = re.compile(rf"(?:\bthe )?\boptions? ({_QUOTED}(?:(?:,? and |,? or |, ){_QUOTED})*)")
_CAMEL_CASE = re.compile(r"'([a-z]+[A-Z]\w*)'|(?<=[\s(])([a-z]+[A-Z]\w*)(?==)")
# Arguments of Python as they are on the command line.
_ARGUMENTS = {
    "deletes='mark'": "--deletes mark",
    "deletes='remove'": "--deletes remove",
    "stored_as_scd_type=2": "--history",
    "commit_interval is": "--commit-interval is",
    "prometheus is": "--prometheus is",
    " with engine='driver':": ":",
    "use engine='spark'": "follow with Spark",
}
_REPEATED = re.compile(r"\b(NATS_URL|NATS_SERVERS|field url of context \S+) and \1\b")

# Help texts where the one of the table is about Spark or a query.
_HELP = {
    "bucket": "Name of the key-value bucket.",
    "stream": "Name of the stream.",
    "subject": "Subject to read, instead of --stream; the stream that has it is looked up.",
    "filterSubjects": "Subjects of --stream to read. Default: all. The filters must not overlap.",
    "startSequence": "First sequence (revision) to read.",
    "servers": f"URLs of the NATS servers. Default: {DEFAULT_SERVER}.",
    "credentials": "Credentials file (user JWT and nkey seed).",
    "credentialsContent": "Content of a credentials file.",
    "nkeySeedFile": "File with a user's nkey seed.",
    "connectTimeout": "Maximum time to connect. Default: 10. A server that refuses the connection "
    "is not tried again.",
}


def flag(name: str) -> str:
    """The flag of an option."""
    return "--" + setting_of(name).replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of an option of the connection."""
    return f"NATS_{setting_of(name).upper()}"


def error_text(error: NatsSourceError, origins: Mapping[str, str]) -> str:
    """The text of an error with settings and options named as the user set them.

    Args:
        origins: by option, the place of its value; the flag if it is missing.
    """
    known = _NAMES | origins.keys()

    def place(name: str) -> str:
        return origins.get(name, flag(name))

    def names_to_places(match: re.Match[str]) -> str:
        names = [name.strip("'") for name in re.findall(_QUOTED, match[1])]
        if not known.issuperset(names):
            return match[0]
        return re.sub(_QUOTED, lambda name: place(name[0].strip("'")), match[1])

    def name_to_place(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return place(name) if name in known else match[0]

    text = _OPTIONS.sub(names_to_places, str(error))
    # Camel case is never a word or a value.
    text = _CAMEL_CASE.sub(name_to_place, text)
    for argument, words in _ARGUMENTS.items():
        text = text.replace(argument, words)
    # A URL has both the user and the password.
    text = _REPEATED.sub(r"\1", text)
    places = names_of_settings(error, {setting_of(name): place(name) for name in known}.get)
    return f"{text} ({' or '.join(places)})" if places else text


def add_options(parser: argparse._ArgumentGroup, options: Iterable[Option]) -> None:
    """Add a flag for each option; the table of options parses and validates the values."""

    def quoted_to_flag(match: re.Match[str]) -> str:
        return flag(match[1]) if match[1] in _NAMES else match[1]

    for option in options:
        description = _HELP.get(option.name, option.help)
        description = re.sub(r"`([^`]+)`", quoted_to_flag, description).replace("%", "%%")
        if _can_prompt(option):
            description = f"{description} Use - to be prompted, or {variable(option.name)}."
        choices = re.findall(r"`(\w+)`", option.kind.name)
        words = option.kind.name.rpartition(" of ")[2].rpartition(" in ")[2].partition(",")[0]
        metavar = "|".join(choices) or words.upper().replace(" ", "-")
        parser.add_argument(flag(option.name), dest=option.name, metavar=metavar, help=description)


def _can_prompt(option: Option) -> bool:
    # `servers` is secret in errors only: a URL with a password is refused.
    return option.secret and option.name != "servers"


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the connection."""
    group = parser.add_argument_group(
        "connection",
        "A flag takes precedence over a variable (NATS_URL, NATS_USER, NATS_PASSWORD, NATS_CREDS, "
        "…), a variable over a context of the nats command.",
    )
    context = group.add_mutually_exclusive_group()
    context.add_argument(
        "--context",
        metavar="NAME",
        help="Context of the nats command. Default: NATS_CONTEXT, else the selected context.",
    )
    context.add_argument("--no-context", action="store_true", help="Do not use a context.")
    add_options(group, CONNECTION)


def given(arguments: argparse.Namespace, options: Iterable[Option]) -> dict[str, str]:
    """The options that have a flag on the command line, by name, as Spark would pass them.

    Prompts once for each secret whose flag requests it.

    Raises:
        OptionError: the prompt requires a terminal.
    """
    values: dict[str, str] = {}
    for option in options:
        value = getattr(arguments, option.name, None)
        if value == _PROMPT and _can_prompt(option):
            try:
                with warnings.catch_warnings():
                    # Without a terminal, getpass would warn and read the standard input.
                    warnings.simplefilter("error", getpass.GetPassWarning)
                    value = getpass.getpass(f"{option.name}: ")
            except (EOFError, OSError, getpass.GetPassWarning):
                raise OptionError(
                    f"could not prompt for option {option.name!r}: it requires a terminal; "
                    f"use {variable(option.name)}"
                ) from None
            setattr(arguments, option.name, value)
        if value is not None:
            values[option.name] = value
    return values


# Variables of the `nats` command with another name than NATS_ and the option.
_NATS_VARIABLES = {
    "servers": "NATS_URL",
    "credentials": "NATS_CREDS",
    "nkeySeedFile": "NATS_NKEY",
    "tlsCaFile": "NATS_CA",
    "tlsCertFile": "NATS_CERT",
    "tlsKeyFile": "NATS_KEY",
}
# The fields of a context, and the options that they set.
_FIELDS = {
    "url": "servers",
    "user": "user",
    "password": "password",
    "creds": "credentials",
    "nkey": "nkeySeedFile",
    "token": "token",
    "cert": "tlsCertFile",
    "key": "tlsKeyFile",
    "ca": "tlsCaFile",
    "tls_first": "tlsHandshakeFirst",
    "inbox_prefix": "inboxPrefix",
    "jetstream_domain": "domain",
    "jetstream_api_prefix": "apiPrefix",
}
_PATHS, _SECRETS = ("creds", "nkey", "cert", "key", "ca"), ("password", "token")
# Without them the connection would take another way, or authenticate as another user.
_UNSUPPORTED = ("nsc", "socks_proxy", "user_jwt", "windows_cert_store")
_REFERENCE = re.compile(r"(env|file|data|op|nsc):(?://)?", re.IGNORECASE)
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


def _context(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Value]:
    if arguments.no_context:
        return {}
    home = environment.get("XDG_CONFIG_HOME")
    directory = (Path(home) if home else Path.home() / ".config") / "nats"
    if name := arguments.context or environment.get("NATS_CONTEXT"):
        return _read_context(directory / "context", name, environment)
    try:
        name = (directory / "context.txt").read_text("utf-8").strip()
        return _read_context(directory / "context", name, environment) if name else {}
    except (OSError, UnicodeDecodeError):
        return {}
    except ContextError as error:
        raise ContextError(
            f"{error}; it is the selected context: --no-context ignores it"
        ) from None


def _read_context(directory: Path, name: str, environment: Mapping[str, str]) -> dict[str, Value]:
    """The options that a context sets. ``servers`` may contain a user and a password."""
    path = directory / f"{name}.json"
    if path.parent != directory or ".." in name:
        raise ContextError(f"invalid name of a context: {name!r}")
    try:
        fields = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in directory.glob("*.json")))
        listed = f"the contexts are {known}" if known else "the directory has no contexts"
        raise ContextError(
            f"could not read context {name!r}: {path} does not exist; {listed}"
        ) from None
    except OSError as error:
        raise ContextError(f"could not read context {name!r}: {path}: {error.strerror}") from None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ContextError(f"could not read context {name!r}: {path} is not a JSON object")
    values = {}
    for field in (*_FIELDS, *_UNSUPPORTED):
        if not (content := fields.get(field)):
            continue
        try:
            text = "true" if field == "tls_first" else _resolved(field, content, environment)
        except ValueError as error:
            raise ContextError(f"could not use context {name!r}: field {field!r} {error}") from None
        # Without quotes, which mark the names of settings in errors.
        values[_FIELDS[field]] = Value(text, f"field {field} of context {name}")
    return values


def _resolved(field: str, content: object, environment: Mapping[str, str]) -> str:
    """The value that a field contains or refers to; a ValueError has what is wrong with it."""
    if field in _UNSUPPORTED:
        raise ValueError("is not supported")
    if not isinstance(content, str):
        raise ValueError("must be a string")
    reference = _REFERENCE.match(content)
    scheme = reference[1].lower() if reference else ""
    rest = content[reference.end() :] if reference else content
    if field in _PATHS:
        if scheme not in ("", "file"):
            raise ValueError("must be the path of a file")
        return os.path.expanduser(os.path.expandvars(rest))
    if field not in _SECRETS or not scheme:
        return content
    if scheme != "env":
        raise ValueError(f"refers to {scheme}:, expected the value itself, or env://NAME")
    if not (value := environment.get(rest)):
        raise ValueError("refers to an environment variable that is not set")
    return value.rstrip("\r\n")


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
