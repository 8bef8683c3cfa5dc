"""Errors of the connection and of JetStream in the terms of the user who can act on them.

These layers name Python settings: ``NatsSourceError.settings`` lists them, and a text may contain
them in quotes (``'connect_timeout'``). A Spark user sets options, a user of the command line sets
flags. So each presenter translates: it replaces the quoted settings in the text, and appends the
settings that the text does not name. The error keeps its class and all other attributes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator

from nats_stream_source.errors import DataLossError, NatsSourceError
from nats_stream_source.options.table import Option

# Arguments of the API that options set under other names.
_ALIASES = {"min_last_seq": "option 'minLastSequence' (nats_kv: 'minLastRevision')"}
_PAIR = re.compile(r"\boption ('\w+') (and|or) option ('\w+')")


def option_names(table: Iterable[Option]) -> dict[str, str]:
    """The options of ``table`` as advice names them, by setting: ``option 'connectTimeout'``."""
    return {option.setting: f"option {option.name!r}" for option in table} | _ALIASES


def translate(error: NatsSourceError, name_of: Callable[[str], str | None]) -> str:
    """The text of ``error`` with its settings translated; those that it does not name follow.

    Args:
        name_of: returns the user's name of a setting, or None if the user cannot set it.
    """
    text, missing = str(error), []
    for setting in error.settings:
        if (name := name_of(setting)) is None:
            continue
        if f"'{setting}'" in text:
            text = text.replace(f"'{setting}'", name)
        elif name.removeprefix("option ") not in text:
            missing.append(name)
    return f"{text}; set {' or '.join(missing)}" if missing else text


def add_option_hints(error: NatsSourceError, names: dict[str, str]) -> None:
    """Translate the text of ``error`` into options, in place and once."""
    if vars(error).get("_translated"):
        return
    text = _PAIR.sub(r"options \1 \2 \3", translate(error, names.get))
    if isinstance(error, DataLossError) and "failOnDataLoss" not in text:
        text += "; set option 'failOnDataLoss' to 'false' to continue without the lost messages"
    error.args = (text, *error.args[1:])
    vars(error)["_translated"] = True


@contextlib.contextmanager
def option_hints(names: dict[str, str]) -> Iterator[None]:
    """Translate the errors that leave the block into options."""
    try:
        yield
    except NatsSourceError as error:
        add_option_hints(error, names)
        raise
