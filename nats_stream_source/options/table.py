"""A table of options: one row each, from which parsing, its errors and the documentation come.

Names are case-insensitive, as Spark's are.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nats_stream_source.errors import OptionError


class Mode(Enum):
    """How a query reads; its value is how users write it."""

    STREAMING = "spark.readStream"
    BATCH = "spark.read"


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``kind`` is its type in words; ``parse`` raises ValueError with the reason.

    ``only`` is the one way of reading that it means something to; None where it does to both.
    """

    name: str
    kind: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str
    secret: bool = False
    only: Mode | None = None


def parse(given: Mapping[str, str], table: tuple[Option, ...]) -> dict[str, Any]:
    """Values by option name, defaults filled in.

    Raises:
        OptionError: a name that the table does not have (with the nearest one), or a value that is
            not of the option's type. The value itself is not repeated for a secret.
    """
    by_name = {option.name.lower(): option for option in table}
    values: dict[str, Any] = {option.name: option.default for option in table}
    for name, text in given.items():
        option = by_name.get(name.lower())
        if option is None:
            near = difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.5)
            hint = f"; did you mean {by_name[near[0]].name!r}?" if near else ""
            raise OptionError(f"unknown option {name!r}{hint}")
        try:
            values[option.name] = option.parse(text)
        except ValueError as error:
            shown = "" if option.secret else f" {text!r}"
            article = "an" if option.kind[0] in "aeiou" else "a"
            raise OptionError(
                f"option {option.name!r}: the value{shown} is not {article} {option.kind}: {error}"
            ) from None
    return values


def markdown_table(table: tuple[Option, ...]) -> str:
    """The table of options as the README shows it."""
    lines = ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
    for option in table:
        default = {None: "", (): "", True: "`true`", False: "`false`"}.get(
            option.default, f"`{option.default}`"
        )
        if isinstance(option.default, float):
            default = f"`{option.default:g}`"
        only = f"; {option.only.name.lower()} only" if option.only else ""
        lines.append(f"| `{option.name}` | {option.kind} | {default} | {option.meaning}{only} |")
    return "\n".join(lines) + "\n"
