"""How often ordered consumers were rebuilt, and why, out of the executors' logs.

A reader that loses its consumer (a gap, missed heartbeats, a restarted server) makes a new one and
goes on; nothing is lost, but it takes time, and many of them tell of a network, a server or a limit
that wants looking at. Each is one line of the executor's Python worker, level ``warning``::

    consumer rebuilt stream=KV_fleet start=0 end=900 position=412 reason=gap attempt=1 …

Where these lines can be had is Spark's to say (docs/operations.md): the worker's standard error,
and for batch reads also Spark's table of Python workers' logs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nats_stream_source.logs import read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TEXT = "consumer rebuilt "
_LOGGER = "nats_stream_source.jetstream.ordered"

Rebuilds = dict[str, Counter[str]]
"""For each stream, how many rebuilds had which reason (the values of ``wire.cursor.Rebuild``)."""


def rebuilds_in(lines: Iterable[str]) -> Rebuilds:
    """Count the rebuilds in lines of a log, whatever a formatter put before the text.

    A line of JSON, as Spark's structured logger writes it, counts as well; also one in another's.
    """
    found: Rebuilds = {}
    for line in lines:
        _, text, rest = _logged(line).partition(_TEXT)
        if not text:
            continue
        fields = read(rest)
        if "stream" in fields and "reason" in fields:
            found.setdefault(fields["stream"], Counter())[fields["reason"]] += 1
    return found


def _logged(line: str) -> str:
    """The text that was logged: of JSON the one that tells of a rebuild, else the whole line."""
    begin = line.find("{")
    if begin == -1 or _TEXT not in line[begin:]:
        return line
    try:
        found: dict[str, object] = json.loads(line[begin:])
    except (ValueError, RecursionError):
        return line
    texts = (text for text in found.values() if isinstance(text, str) and _TEXT in text)
    return _logged(next(texts, ""))


def rebuilds(spark: SparkSession) -> Rebuilds:
    """Count the rebuilds that Spark's table of Python workers' logs holds for this session.

    Spark fills it from version 4.1 on and where ``spark.sql.pyspark.worker.logging.enabled`` is
    true, for batch reads only: Spark 4.2 does not collect the logs of a streaming query's tasks.
    """
    logs = spark.tvf.python_worker_logs()
    found: Rebuilds = {}
    for (context,) in logs.where(logs.logger == _LOGGER).select("context").collect():
        if context and "reason" in context:
            found.setdefault(context["stream"], Counter())[context["reason"]] += 1
    return found
