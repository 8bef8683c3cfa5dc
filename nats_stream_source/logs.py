"""Log lines with fields, readable for people, for ``grep`` and for Spark's structured logger.

A line is a fixed message followed by fields as ``key=value``. Values that contain spaces or quotes
are JSON strings::

    consumer rebuilt stream=KV_fleet start=0 end=900 position=412 reason=gap attempt=1

The record holds the same fields as ``record.context``, a dictionary of strings. Spark's JSON
formatter (``pyspark.logger``) and its table of Python workers' logs read them from there.

Levels: ``debug`` for details that only the developers of this package need, ``info`` for an unusual
path that is complete, ``warning`` for an event that cost time or data and was handled. A failure is
an exception, not a log line. An idle query logs nothing. Fields are names, numbers and the messages
of this package's errors, and contain no secrets. Message payloads are not logged, except up to 60
bytes of input that violates the NATS protocol.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:  # LoggerAdapter is not generic before Python 3.11
    Adapter = logging.LoggerAdapter

_LOGGING_ARGUMENTS = ("exc_info", "stack_info", "stacklevel", "extra")
_BARE = re.compile(r'[^\s"=\x00-\x1f\x7f]+')


class FieldLogger(Adapter):
    """A module's logger; keyword arguments of its methods are fields.

    A message with fields takes no positional arguments: pass these values as fields. Fields that
    are None or empty are omitted.
    """

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Move the fields into the message and into the record's ``context``."""
        names = [name for name in kwargs if name not in _LOGGING_ARGUMENTS]
        if not names:
            return msg, kwargs
        fields = {name: kwargs.pop(name) for name in names}
        context = {name: str(value) for name, value in fields.items() if value not in (None, "")}
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "context": context}
        return f"{msg} {format_fields(context)}", kwargs


def field_logger(name: str) -> FieldLogger:
    """Return the logger of the module ``name``."""
    return FieldLogger(logging.getLogger(name), {})


def format_fields(fields: dict[str, str]) -> str:
    """Format fields as they appear in a log line."""
    return " ".join(
        f"{name}={value if _BARE.fullmatch(value) else json.dumps(value, ensure_ascii=False)}"
        for name, value in fields.items()
    )
