"""The server of the tests that count resources, and reads of its bucket."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import psutil
import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.query_driver.driver import new_query

ROWS = 3000
"""Rows of the bucket ``full``."""

VALUE = b"x" * 8000
"""Value of each of its rows."""

TIMEOUTS = {"connectTimeout": 20, "requestTimeout": 20}


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """Server whose bucket ``full`` has ``ROWS`` values of 8 KB: three batches with flow control."""
    with NatsServer() as server:
        create_bucket(server.url, "full", history=2)
        put_many(server.url, "full", ((f"k{i}", VALUE) for i in range(ROWS)))
        yield server


def batch_row_counts(url: str, bucket: str = "full") -> Generator[int, None, None]:
    """Yield the row count of each record batch of a split, read on demand as Spark does."""
    options = {"bucket": bucket, "includeHistory": True, **TIMEOUTS}
    with new_query(url, cores=1, **options) as query:
        assert query.plan()
        assert query.logged is not None
        (task,) = query.partitions(query.offset, query.logged)
        with contextlib.closing(query.read_task(task)) as batches:  # type: ignore[type-var]
            for batch in batches:
                yield batch.num_rows


def open_files() -> int:
    return int(psutil.Process().num_fds())
