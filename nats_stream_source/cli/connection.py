"""The options of the formats as flags, made from the tables of options.

``credentialsContent`` is ``--credentials-content``. The options of the connection can also come
from the environment, as ``NATS_`` and the name: ``NATS_SERVERS``, ``NATS_USER``, ``NATS_PASSWORD``,
``NATS_CREDENTIALS``; a flag takes precedence. Other users of the machine can read a command line:
with ``-`` as the value of a secret, the command prompts for it without an echo.
"""

from __future__ import annotations

import argparse
import getpass
import os
import re
from collections.abc import Iterable, Mapping

from nats_stream_source.errors import NatsSourceError, OptionError
from nats_stream_source.options import CONNECTION, KV, STREAM, Option
from nats_stream_source.options.hints import translate

_PROMPT = "-"
# The options beside those of the connection that have flags.
KV_FLAGS, STREAM_FLAGS, COMMON_FLAGS = (
    tuple(option for option in table if option.name in names)
    for table, names in (
        (KV, ("bucket", "keys")),
        (STREAM, ("stream", "subject", "filterSubjects")),
        (STREAM, ("startSequence",)),
    )
)
_FLAGS = {option.name for option in CONNECTION + KV_FLAGS + STREAM_FLAGS + COMMON_FLAGS}
_SETTINGS = {
    option.setting: option.name for option in CONNECTION + KV_FLAGS + STREAM_FLAGS + COMMON_FLAGS
}
_QUOTED = r"'\w+'"
_OPTIONS = re.compile(rf"\boptions? ({_QUOTED}(?:(?:,? and |,? or |, ){_QUOTED})*)")


def _snake_case(name: str) -> str:
    return re.sub(r"([A-Z])", r"_\1", name).lower()


def flag(name: str) -> str:
    """The flag of an option."""
    return "--" + _snake_case(name).replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of an option of the connection."""
    return f"NATS_{_snake_case(name).upper()}"


def error_text(error: NatsSourceError) -> str:
    """The text of an error with settings and options named by their flags."""

    def names_to_flags(match: re.Match[str]) -> str:
        names = [name.strip("'") for name in re.findall(_QUOTED, match[1])]
        if not _FLAGS.issuperset(names):
            return match[0]
        return re.sub(_QUOTED, lambda name: flag(name[0].strip("'")), match[1])

    def flag_of(setting: str) -> str | None:
        return flag(_SETTINGS[setting]) if setting in _SETTINGS else None

    return _OPTIONS.sub(names_to_flags, translate(error, flag_of))


def add_options(parser: argparse._ArgumentGroup, options: Iterable[Option]) -> None:
    """Add a flag for each option; the table of options parses and validates the values."""
    for option in options:
        description = option.description.replace("`", "").replace("%", "%%")
        if _can_prompt(option):
            description = f"{description} - prompts for it (or {variable(option.name)})"
        kind = option.kind.rpartition(" of ")[2].rpartition(" in ")[2].upper().replace(" ", "-")
        parser.add_argument(flag(option.name), dest=option.name, metavar=kind, help=description)


def _can_prompt(option: Option) -> bool:
    # `servers` is secret in errors only: a URL with a password is refused.
    return option.secret and option.name != "servers"


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the connection."""
    group = parser.add_argument_group(
        "connection",
        "The options of the Spark formats, as flags. Each may also come from the environment, as "
        "NATS_SERVERS or NATS_PASSWORD; a flag takes precedence.",
    )
    add_options(group, CONNECTION)


def given(arguments: argparse.Namespace, options: Iterable[Option]) -> dict[str, str]:
    """The options that have a value, by name, as Spark would pass them.

    Prompts once for each secret whose flag requests it.

    Raises:
        OptionError: the prompt requires a terminal.
    """
    values: dict[str, str] = {}
    for option in options:
        value = getattr(arguments, option.name, None)
        if value == _PROMPT and _can_prompt(option):
            try:
                value = getpass.getpass(f"{option.name}: ")
            except (EOFError, OSError):
                raise OptionError(
                    f"could not prompt for option {option.name!r}: it requires a terminal; "
                    f"use {variable(option.name)}"
                ) from None
            setattr(arguments, option.name, value)
        if value is not None:
            values[option.name] = value
    return values


def connection(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The options of the connection, from flags and environment."""
    values = given(arguments, CONNECTION)
    for option in CONNECTION:
        if (value := environment.get(variable(option.name))) and option.name not in values:
            values[option.name] = value
    return values
