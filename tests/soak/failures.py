"""What a query failed with: the last exception of what it says, and nothing that led to it.

Spark reports a failure as one text, which holds all of these, one after the other: an exception's
causes and contexts ("The above exception was …", "During handling of …"), each with a traceback;
where a task or a function of ``foreachBatch`` failed, the driver's own traceback first and the
worker's after it, as the text of a ``PythonException``; and what Spark knows of the query. So what
counts is the last "Traceback" and the first line after its frames. A text without any is the
exception itself, as ``soak.plain`` and the JVM write it.

A failure *passes* when it says no more than that a server was away: a supervisor starts the query
again. One that came of handling such a failure (a ``KeyError`` on the way) does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ERRORS = "nats_stream_source.errors."
PASSING = (
    "ConnectError",
    "RequestTimeoutError",
    "AckTimeoutError",
    "ConsumerLostError",
    "MinLastSequenceError",
    "JetStreamNotEnabledError",
)
"""Failures of this package that a query may end with while servers are away."""

_AWAY = re.compile(r"\((code|Direct Get,) 5\d\d\b")
"""What an ``ApiError`` says where the server says that it has no leader, or no answer now."""

_STARVED = ("failed to connect back", "CANNOT_OPEN_SOCKET")
"""What Spark says where a Python worker does not start within 10 s: the machine is too busy."""

LOSS = "data loss"
STARVED = "worker not started"
UNEXPECTED = "unexpected"

_TRACEBACK = "Traceback (most recent call last):\n"
QUERY = "\n=== Streaming Query ==="
"""What begins with this is what Spark knows of the query, and no part of the failure."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception as a text tells of it.

    Attributes:
        name: its class, with the module; of a failure of the JVM, whatever its text begins with.
        message: all that follows.
    """

    name: str
    message: str


def last_raised(text: str) -> Raised:
    """The last exception of a failure's text."""
    text = text.partition(QUERY)[0]
    _, found, rest = text.rpartition(_TRACEBACK)
    lines = rest.split("\n")
    while found and lines and (not lines[0] or lines[0][0].isspace()):
        lines.pop(0)  # a frame
    name, _, message = "\n".join(lines).partition(":")
    return Raised(name.strip(), message.strip())


def kind_of(text: str) -> str:
    """The name of a failure that passes, or :data:`LOSS`, :data:`STARVED`, :data:`UNEXPECTED`."""
    raised = last_raised(text)
    module, _, name = raised.name.rpartition(".")
    if f"{module}." == _ERRORS:
        if name == "DataLossError":
            return LOSS
        if name in PASSING or (name == "ApiError" and _AWAY.search(raised.message)):
            return name
        return UNEXPECTED
    # Spark's own, or the JVM's, which has no traceback of a worker's exception.
    sparks = _TRACEBACK not in text or raised.name.startswith(("pyspark.", "py4j."))
    if sparks and any(words in f"{raised.name} {raised.message}" for words in _STARVED):
        return STARVED
    return UNEXPECTED


def is_loss(text: str) -> bool:
    """Whether the query stopped because data is lost."""
    return kind_of(text) == LOSS
