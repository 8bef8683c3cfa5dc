"""The options of the formats as flags: help texts, prompts, and errors that name the flags.

The flags are made from the tables of options: ``credentialsContent`` is ``--credentials-content``.
Other users of the machine can read a command line: with ``-`` as the value of a secret, the command
prompts for it without an echo.
"""

from __future__ import annotations

import argparse
import getpass
import re
import warnings
from collections.abc import Iterable, Mapping

from nats_stream_source.errors import NatsSourceError, OptionError
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
_SETTINGS = {option.setting: option.name for option in _ALL_FLAGS}
_QUOTED = r"'\w+'"
_OPTIONS = re.compile(rf"(?:\bthe )?\boptions? ({_QUOTED}(?:(?:,? and |,? or |, ){_QUOTED})*)")
_CAMEL_CASE = re.compile(r"'([a-z]+[A-Z]\w*)'")
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

    def place(name: str) -> str:
        return origins.get(name, flag(name))

    def names_to_places(match: re.Match[str]) -> str:
        names = [name.strip("'") for name in re.findall(_QUOTED, match[1])]
        if not _NAMES.issuperset(names):
            return match[0]
        return re.sub(_QUOTED, lambda name: place(name[0].strip("'")), match[1])

    def place_of_setting(setting: str) -> str | None:
        return place(_SETTINGS[setting]) if setting in _SETTINGS else None

    text = _OPTIONS.sub(names_to_places, str(error))
    # Camel case is never a word or a value.
    text = _CAMEL_CASE.sub(lambda name: place(name[1]) if name[1] in _NAMES else name[0], text)
    # A URL has both the user and the password.
    text = _REPEATED.sub(r"\1", text)
    places = names_of_settings(error, place_of_setting)
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
