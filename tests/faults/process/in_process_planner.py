"""A planner without Spark, in this process, and the size of the bucket ``full`` that it reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

from nats_stream_source.options import Mode, kv_options, stream_options
from nats_stream_source.rows.base import FormatAdapter
from nats_stream_source.spark.reading.split_reader import read_splits
from nats_stream_source.spark.runner import Runner, close_cached_runners
from tests.support.format_adapter import format_adapter
from tests.support.query_driver.one_stream import OneStreamPlanner

ROWS = 3000
"""Rows of the bucket ``full``."""

VALUE = b"x" * 8000
"""Value of each of its rows."""


async def _no_sleep(seconds: float) -> None:
    pass


@contextlib.contextmanager
def open_planner(
    url: str, *, clock: Callable[[], float] | None = None, **options: Any
) -> Iterator[tuple[Runner, OneStreamPlanner, FormatAdapter]]:
    """Open a planner as Spark's driver does, on one core: a range of any length is one split.

    Args:
        clock: replaces the real clock; the planner then does not sleep between requests either.
    """
    given = {"servers": url, "connectTimeout": "20", "requestTimeout": "20", **options}
    parse = stream_options if "stream" in options else kv_options
    query = format_adapter(parse({k: str(v) for k, v in given.items()}, Mode.STREAMING))
    runner = Runner(query.options.connection)
    own = {} if clock is None else {"clock": clock, "sleep": _no_sleep}
    try:
        yield runner, OneStreamPlanner(query, runner.connection, cores=1, **own), query
    finally:
        runner.close()
        close_cached_runners()


def batch_row_counts(url: str, bucket: str = "full") -> Generator[int, None, None]:
    """Yield the row count of each record batch of a split, read on demand as Spark does."""
    with open_planner(url, bucket=bucket, includeHistory=True) as (runner, planner, query):
        start = runner.run(planner.initial_offset())
        end = runner.run(planner.latest_offset(start))
        (plan,) = runner.run(planner.splits(start, end))
        reading = read_splits((plan,), query)
        with contextlib.closing(reading):  # type: ignore[type-var]
            for batch in reading:
                yield batch.num_rows


def open_files() -> int:
    """Return the number of file descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))
