"""Log lines with fields, the same for a person, for ``grep`` and for Spark's structured logger.

A line is a fixed text and what it is about, as ``key=value`` (values with spaces or quotes as JSON
strings)::

    consumer rebuilt stream=KV_fleet start=0 end=900 position=412 reason=gap attempt=1

The same fields are on the record as ``record.context``, texts by name: that is where Spark's JSON
formatter (``pyspark.logger``) and its table of Python workers' logs look for them.

Levels: ``debug`` for what only we want to know, ``info`` for what went another way than usual and
is over, ``warning`` for what cost time or data and was survived. A failure is an exception, not a
line. A query that is idle logs nothing. Fields are names, numbers and our own errors' texts, which
never hold a secret; a message's payload is never one, but for 60 bytes of what is no NATS protocol.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:  # it takes no argument before Python 3.11
    Adapter = logging.LoggerAdapter

_LOGGINGS_OWN = ("exc_info", "stack_info", "stacklevel", "extra")
_BARE = re.compile(r'[^\s"=\x00-\x1f\x7f]+')
_FIELD = re.compile(r'(?:^|\s)(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


class FieldLogger(Adapter):
    """A module's logger; keyword arguments of its methods are fields.

    A text with fields takes no positional arguments: what would go there is a field. One that is
    None or empty is left out.
    """

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Move the fields into the text and into the record's ``context``."""
        names = [name for name in kwargs if name not in _LOGGINGS_OWN]
        if not names:
            return msg, kwargs
        given = {name: kwargs.pop(name) for name in names}
        context = {name: str(value) for name, value in given.items() if value not in (None, "")}
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "context": context}
        return f"{msg} {written(context)}", kwargs


def field_logger(name: str) -> FieldLogger:
    """The logger of the module ``name``."""
    return FieldLogger(logging.getLogger(name), {})


def written(fields: dict[str, str]) -> str:
    """Fields as they stand in a line."""
    return " ".join(
        f"{name}={value if _BARE.fullmatch(value) else json.dumps(value, ensure_ascii=False)}"
        for name, value in fields.items()
    )


def read(line: str) -> dict[str, str]:
    """The fields of a line, whatever stands before them; none for a line that has none."""
    found: dict[str, str] = {}
    for name, value in _FIELD.findall(line):
        if value.startswith('"'):
            try:
                value = json.loads(value)
            except ValueError:
                continue  # somebody else's line that looks alike
        found[name] = str(value)
    return found
