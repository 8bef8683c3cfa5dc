"""A table of options: each row defines one option; parsing, errors and documentation use the table.

Names are case-insensitive, as in Spark.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeVar

from nats_stream_source.errors import DataLossError, NatsSourceError, OptionError
from nats_stream_source.options.converters import Kind

T = TypeVar("T")


class Mode(Enum):
    """How a query reads; the value is the Spark API that starts it."""

    STREAMING = "spark.readStream"
    BATCH = "spark.read"


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: the name in Spark, in camel case.
        kind: converts the string that Spark passes; raises ValueError with the reason, a verb
            phrase such as ``is not an integer``, which never contains the value.
        description: what the option sets, then its default and limits. ``{default}`` stands for
            the text of ``default``.
        default: the value when the option is not set.
        secret: whether the value must not appear in errors.
        only: the one mode that the option applies to; None if it applies to both.
        advice: what to write instead of an invalid value.
    """

    name: str
    kind: Kind[Any]
    description: str
    default: Any = None
    secret: bool = False
    only: Mode | None = None
    advice: str = ""

    @property
    def help(self) -> str:
        """The description with the default, for the documentation."""
        default = self.default
        shown = f"{default:g}" if isinstance(default, float) else f"{default}"
        if isinstance(default, bool):
            shown = f"`{shown.lower()}`"
        elif isinstance(default, (str, Enum)):
            shown = f"`{default.value if isinstance(default, Enum) else default}`"
        return self.description.replace("{default}", f"Default: {shown}")

    @property
    def setting(self) -> str:
        """The Python name: a field of ``ConnectionSettings`` or an argument of the API."""
        return setting_of(self.name)


def setting_of(name: str) -> str:
    """The Python name of an option: its name in snake case."""
    return re.sub(r"([A-Z])", r"_\1", name).lower()


class Values(dict[str, Any]):
    """Parsed values by option name; options that are not given have their default."""

    def __init__(self, table: Iterable[Option], given: dict[str, Any]) -> None:
        super().__init__({option.name: option.default for option in table} | given)
        self._given = given

    def is_set(self, name: str) -> bool:
        """Whether the option is given; a boolean that is false sets nothing."""
        return name in self._given and self[name] is not False

    def validate_exclusive(self, *names: str, reason: str) -> None:
        """Raise OptionError if more than one of the options ``names`` is set."""
        given = [name for name in names if self.is_set(name)]
        if len(given) > 1:
            raise OptionError(
                f"options {given[0]!r} and {given[1]!r} contradict each other: {reason}"
            )

    def validate_effect(self, name: str, *required: str) -> None:
        """Raise OptionError if ``name`` is set and none of the options that it depends on."""
        if self.is_set(name) and not any(map(self.is_set, required)):
            others = " or ".join(map(repr, required))
            raise OptionError(
                f"option {name!r} has no effect without {others}; set it, or remove it"
            )

    def build(self, cls: type[T], **computed: Any) -> T:
        """An options class: a field has the option of its name in snake case, or ``computed``."""
        values = {setting_of(name): value for name, value in self.items()} | computed
        own = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in values.items() if name in own})


def parse(
    given: Mapping[str, object], table: tuple[Option, ...], advice: Mapping[str, str] | None = None
) -> Values:
    """Parse the options that are given.

    Args:
        advice: what to write instead of a name that is not in the table.

    Raises:
        OptionError: a name is not in the table (the error has the advice, or the nearest name), or
            a value is not of the option's type. The error does not contain the value of a secret.
    """
    by_name = {option.name.lower(): option for option in table}
    values: dict[str, Any] = {}
    for name, value in given.items():
        option = by_name.get(name.lower())
        if option is None:
            raise OptionError(f"unknown option {name!r}{_instead(name, by_name, advice or {})}")
        if not isinstance(value, (str, int, float)):
            raise OptionError(
                f"invalid value for option {option.name!r}: it is a {type(value).__name__}, "
                f"expected a text, number or boolean"
            )
        text = str(value).lower() if isinstance(value, bool) else str(value)  # as pyspark has it
        try:
            values[option.name] = option.kind(text)
        except ValueError as error:
            shown = "the value" if option.secret else repr(text)
            action = f"; {option.advice}" if option.advice else ""
            raise OptionError(
                f"invalid value for option {option.name!r}: {shown} {error}{action}"
            ) from None
    return Values(table, values)


def _instead(name: str, by_name: Mapping[str, Option], advice: Mapping[str, str]) -> str:
    """What to write instead of an unknown name; the page with all names if no option is near."""
    # Spark passes names in lower case.
    if text := {one.lower(): text for one, text in advice.items()}.get(name.lower()):
        return f": {text}"
    near = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {by_name[near[0]].name!r}?"
    return "; docs/options.md lists the options"


# -- errors of the layers below ------------------------------------------------------------------
#
# These layers name Python settings: `NatsSourceError.settings` lists them. A Spark user sets
# options, a user of the command line sets flags. So each presenter appends their names to the text:
# `(option 'connectTimeout')`. The error keeps its class and all other attributes.

# Arguments of the API that options set under other names.
_ALIASES = {"min_last_seq": "'minLastSequence' (nats_kv: 'minLastRevision')"}


def names_of_settings(error: NatsSourceError, name_of: Callable[[str], str | None]) -> list[str]:
    """The names that ``name_of`` has for the settings of ``error``; [] once its text has hints."""
    if vars(error).get("_has_options"):
        return []
    names = (name_of(setting) for setting in error.settings)
    return list(dict.fromkeys(name for name in names if name is not None))


def add_option_hints(error: NatsSourceError, table: Iterable[Option]) -> None:
    """Append the options that the caller can change to the text of ``error``, in place and once."""
    text, names = str(error), {option.setting: repr(option.name) for option in table} | _ALIASES
    options = names_of_settings(error, names.get)
    if any(option not in text for option in options):
        text += f" ({'options' if len(options) > 1 else 'option'} {' or '.join(options)})"
        vars(error)["_has_options"] = True
    if isinstance(error, DataLossError) and "failOnDataLoss" not in text:
        text += "; set option 'failOnDataLoss' to 'false' to continue without the lost messages"
    error.args = (text, *error.args[1:])


@contextlib.contextmanager
def option_hints(table: Iterable[Option]) -> Iterator[None]:
    """Append options of ``table`` to the errors that leave the block."""
    try:
        yield
    except NatsSourceError as error:
        add_option_hints(error, table)
        raise
