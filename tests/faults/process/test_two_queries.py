"""Two queries in two drivers follow two buckets into one table."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.process.follow_driver import following
from tests.support.followed import Query, Writer
from tests.support.nats import buckets
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

BUCKETS = ("a", "b")
BATCHES = 20
_DEADLINE = 300.0  # seconds


@pytest.mark.parametrize("arguments", [{}, {"stored_as_scd_type": 2}], ids=["latest", "history"])
def test_two_drivers_follow_into_one_table(
    nats_server: NatsServer, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    url, table = nats_server.url, tmp_path / "table"
    queries = []
    for name in BUCKETS:
        buckets.create_bucket(url, name, 64)
        directory = tmp_path / name
        directory.mkdir()
        query = Query({"bucket": name, "includeHistory": "true"}, arguments)
        queries.append((query, table, directory))
    writer = Writer(url, BUCKETS, random.Random(1))
    writer.start()

    def batches() -> list[int]:
        return [len(list(one.glob("checkpoint/commits/[0-9]*"))) for _, _, one in queries]

    def conflicted() -> bool:
        logs = [one.read_text() for one in tmp_path.glob("*/log")]
        return any("another writer changed the table" in log for log in logs)

    def stored() -> bool:
        return queries[0][0].stored(table) == expected

    with contextlib.ExitStack() as stack:
        processes = []
        for one in queries:
            processes.append(stack.enter_context(following(one[2], url, [one])))

        def alive() -> None:
            assert [process.poll() for process in processes] == [None, None]
            assert not list(tmp_path.glob("*/errors")), "a query ended"

        wait_until(
            lambda: min(batches()) >= BATCHES and conflicted(),
            "micro-batches and a conflict of their commits",
            _DEADLINE,
            alive=alive,
        )
        writer.stop()
        expected = sorted(row for query, _, _ in queries for row in query.expected(writer.written))
        wait_until(stored, "the table to be equal", _DEADLINE, alive=alive)
        alive()
