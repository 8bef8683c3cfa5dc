"""Streaming queries that start and end also on a busy machine.

Spark gives the Python process of a query's planner ten seconds to start, however busy the machine
is. A query that ends for that has called nothing of the source and read nothing, so it is started
again. Every other failure is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.support.wait import wait_until

_DEADLINE = 600  # seconds; only a query that hangs takes that long
_ATTEMPTS = 10


def begin(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """What ``start`` starts, once its planner's process runs or it has failed otherwise."""
    for _ in range(_ATTEMPTS - 1):
        query = start()
        wait_until(partial(_has_sources, query), "the query begins", _DEADLINE)
        error = query.exception()
        if error is None or "Python worker failed to connect back" not in str(error):
            return query
        query.stop()
    return start()


def _has_sources(query: StreamingQuery) -> bool:
    # Spark makes the sources, and their processes, under this status. It is another one as soon as
    # that is done, or when the error is known.
    return not query.status["message"].startswith("Initializing")


def run_to_the_end(start: Callable[[], StreamingQuery]) -> None:
    """Run what ``start`` starts, with ``Trigger.AvailableNow``, to its end or to its failure."""
    query = begin(start)
    try:
        assert query.awaitTermination(_DEADLINE), "the query goes on and on"
    finally:
        query.stop()


@contextmanager
def report_each_second(spark: SparkSession) -> Iterator[None]:
    """Queries that start in the block report each second that they are idle, not every ten."""
    name = "spark.sql.streaming.noDataProgressEventInterval"
    before = spark.conf.get(name)
    assert before is not None
    spark.conf.set(name, "1s")
    try:
        yield
    finally:
        spark.conf.set(name, before)
