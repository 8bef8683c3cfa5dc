"""Classifies the failure of a query by the last exception in its text. Pure.

Spark reports a failure as one text with these parts in order: an exception's causes and contexts
("The above exception was …", "During handling of …"), each with a traceback; if a task or a
``foreachBatch`` function failed, the driver's own traceback first and the worker's after it, as the
text of a ``PythonException``; and Spark's description of the query. So the failure is the last
"Traceback" and the first line after its frames. A text without a traceback is the exception itself,
as the query driver without Spark and the JVM report it.

A failure is *transient* if it only reports that a server was unavailable: a supervisor restarts the
query. An exception that was raised while such a failure was handled (a ``KeyError``) is not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ERRORS = "nats_stream_source.errors."
TRANSIENT = (
    "ConnectError",
    "RequestTimeoutError",
    "AckLostError",
    "AckTimeoutError",
    "NoStreamError",
    "ConsumerLostError",
    "MinLastSequenceError",
    "JetStreamNotEnabledError",
)
"""Errors of this package that may end a query while servers are unavailable."""

_UNAVAILABLE = re.compile(r"\((code|Direct Get,) 5\d\d\b")
"""In an ``ApiError``: the server reports that a leader or a response is unavailable."""

_START_TIMEOUT = ("failed to connect back", "CANNOT_OPEN_SOCKET")
"""Spark's errors if a Python worker does not start within 10 s, on a busy machine."""

DATA_LOSS = "data loss"
WORKER_START = "worker not started"
UNEXPECTED = "unexpected"

_TRACEBACK = "Traceback (most recent call last):\n"
QUERY_DESCRIPTION = "\n=== Streaming Query ==="
"""Start of Spark's description of the query, which is not part of the failure."""


@dataclass(frozen=True, slots=True)
class RaisedError:
    """An exception in the text of a failure.

    Attributes:
        name: its class, with the module; for a failure of the JVM, the start of its text.
        message: the text after the name.
    """

    name: str
    message: str


def last_raised(text: str) -> RaisedError:
    """The last exception of a failure's text."""
    text = text.partition(QUERY_DESCRIPTION)[0]
    _, traceback, rest = text.rpartition(_TRACEBACK)
    lines = rest.split("\n")
    while traceback and lines and (not lines[0] or lines[0][0].isspace()):
        lines.pop(0)  # a frame
    name, _, message = "\n".join(lines).partition(":")
    return RaisedError(name.strip(), message.strip())


def kind_of(text: str) -> str:
    """The kind of a failure.

    Returns:
        The name of a transient error, :data:`DATA_LOSS`, :data:`WORKER_START` or
        :data:`UNEXPECTED`.
    """
    raised = last_raised(text)
    module, _, name = raised.name.rpartition(".")
    if f"{module}." == _ERRORS:
        if name == "DataLossError":
            return DATA_LOSS
        if name in TRANSIENT or (name == "ApiError" and _UNAVAILABLE.search(raised.message)):
            return name
        return UNEXPECTED
    # An error of Spark, or of the JVM, which has no traceback of a worker's exception.
    of_spark = _TRACEBACK not in text or raised.name.startswith(("pyspark.", "py4j."))
    if of_spark and any(words in f"{raised.name} {raised.message}" for words in _START_TIMEOUT):
        return WORKER_START
    return UNEXPECTED


def is_data_loss(text: str) -> bool:
    """Whether the query stopped for data loss."""
    return kind_of(text) == DATA_LOSS
