"""Options of the formats as flags of the command, made from the options' own tables.

``credentialsContent`` is ``--credentials-content``. Options of the connection may also come from
the environment, ``NATS_`` and the name: ``NATS_SERVERS``, ``NATS_USER``, ``NATS_PASSWORD``,
``NATS_CREDENTIALS``; a flag wins. What stands on a command line can be seen by others on the
machine: ``-`` for a secret makes the command ask for it, without an echo.
"""

from __future__ import annotations

import argparse
import getpass
import os
import re
from collections.abc import Iterable, Mapping

from nats_stream_source.errors import OptionError
from nats_stream_source.options import CONNECTION, Option

_ASK = "-"


def _words(name: str) -> str:
    return re.sub(r"([A-Z])", r"_\1", name).lower()


def flag(name: str) -> str:
    """The flag of an option."""
    return "--" + _words(name).replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of an option of the connection."""
    return f"NATS_{_words(name).upper()}"


def add_options(parser: argparse._ArgumentGroup, options: Iterable[Option]) -> None:
    """A flag for each option; parsing and checking stay with the options' table."""
    for option in options:
        meaning = option.meaning.replace("`", "").replace("%", "%%")
        if _is_asked(option):
            meaning = f"{meaning}; - asks for it (or {variable(option.name)})"
        kind = option.kind.rpartition(" of ")[2].upper().replace(" ", "-")
        parser.add_argument(flag(option.name), dest=option.name, metavar=kind, help=meaning)


def _is_asked(option: Option) -> bool:
    # Addresses count as secret where they are shown, since a password in one is only then refused.
    return option.secret and option.name != "servers"


def add_connection(parser: argparse.ArgumentParser) -> None:
    """The flags of the connection."""
    group = parser.add_argument_group(
        "connection",
        "The options of the Spark formats, as flags. Each may also come from the environment, as "
        "NATS_SERVERS or NATS_PASSWORD; a flag wins.",
    )
    add_options(group, CONNECTION)


def given(arguments: argparse.Namespace, options: Iterable[Option]) -> dict[str, str]:
    """The options that have a value, by name, as Spark would have them.

    Secrets are asked for where the flag says so, and once only.

    Raises:
        OptionError: there is no terminal to ask on.
    """
    found: dict[str, str] = {}
    for option in options:
        value = getattr(arguments, option.name, None)
        if value == _ASK and _is_asked(option):
            try:
                value = getpass.getpass(f"{option.name}: ")
            except (EOFError, OSError):
                raise OptionError(
                    f"option {option.name!r}: there is no terminal to ask for it"
                ) from None
            setattr(arguments, option.name, value)
        if value is not None:
            found[option.name] = value
    return found


def connection(
    arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The options of the connection, from flags and environment."""
    found = given(arguments, CONNECTION)
    for option in CONNECTION:
        if (value := environment.get(variable(option.name))) and option.name not in found:
            found[option.name] = value
    return found
