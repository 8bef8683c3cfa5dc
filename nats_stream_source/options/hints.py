"""Errors of the connection and of JetStream in the terms of the user who can act on them.

These layers name Python settings: ``NatsSourceError.settings`` lists them. A Spark user sets
options, a user of the command line sets flags. So each presenter appends their names to the text:
``(option 'connectTimeout')``. The error keeps its class and all other attributes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from nats_stream_source.errors import DataLossError, NatsSourceError
from nats_stream_source.options.table import Option

# Arguments of the API that options set under other names.
_ALIASES = {"min_last_seq": "'minLastSequence' (nats_kv: 'minLastRevision')"}


def option_names(table: Iterable[Option]) -> dict[str, str]:
    """The names of the options of ``table``, in quotes, by setting."""
    return {option.setting: repr(option.name) for option in table} | _ALIASES


def names_of_settings(error: NatsSourceError, name_of: Callable[[str], str | None]) -> list[str]:
    """The user's names of the settings of ``error``; ``name_of`` returns None where none exists."""
    names = (name_of(setting) for setting in error.settings)
    return list(dict.fromkeys(name for name in names if name is not None))


def add_option_hints(error: NatsSourceError, names: dict[str, str]) -> None:
    """Append the options that the caller can change to the text of ``error``, in place and once."""
    if vars(error).get("_has_options"):
        return
    text = str(error)
    options = names_of_settings(error, names.get)
    if any(option not in text for option in options):
        text += f" ({'options' if len(options) > 1 else 'option'} {' or '.join(options)})"
    if isinstance(error, DataLossError) and "failOnDataLoss" not in text:
        text += "; set option 'failOnDataLoss' to 'false' to continue without the lost messages"
    error.args = (text, *error.args[1:])
    vars(error)["_has_options"] = True


@contextlib.contextmanager
def option_hints(names: dict[str, str]) -> Iterator[None]:
    """Append the options to the errors that leave the block."""
    try:
        yield
    except NatsSourceError as error:
        add_option_hints(error, names)
        raise
