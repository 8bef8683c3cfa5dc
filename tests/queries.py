"""Streaming queries that are run to their end, also on a machine that is busy with other things."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming import StreamingQuery

_DEADLINE = 600  # seconds; only a query that hangs takes that long
_ATTEMPTS = 10


def run_to_the_end(start: Callable[[], StreamingQuery]) -> None:
    """Run what ``start`` starts, with ``Trigger.AvailableNow``, to its end or to its failure.

    Spark gives the Python process of a query's planner ten seconds to start, however busy the
    machine is. A query that fails for that has not begun, and is started again.
    """
    for left in reversed(range(_ATTEMPTS)):
        query = start()
        try:
            assert query.awaitTermination(_DEADLINE), "the query goes on and on"
            return
        except StreamingQueryException as error:
            if not left or "failed to connect back" not in str(error):
                raise
        finally:
            query.stop()
