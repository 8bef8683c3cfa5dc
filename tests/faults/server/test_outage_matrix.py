"""Outages of each kind and length under a query with a Delta table: every entry is read once.

The servers refuse connections, drop all packets, or take none from the client (half-open); a stream
has no majority. The query runs with ``processingTime`` or ``availableNow``. It writes each
micro-batch into a Delta table in ``foreachBatch``, which equals the bucket at the end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.delta import merge_changes
from nats_stream_source.embedded import NatsServer
from tests.integration.delta.merge_model import live
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.nats.cluster import Cluster
from tests.support.proxy.fault_proxy import Proxy
from tests.support.query_driver.batch import read_batch
from tests.support.spark.streaming_query import begin
from tests.support.wait import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.delta]

ROWS = 300
PER_BATCH = 50

Fault = tuple[Callable[[], object], Callable[[], object]]
"""Begins an outage, and ends it."""


@contextlib.contextmanager
def place(how: str) -> Iterator[tuple[str, str, Fault]]:
    """The addresses for the query and for the writer, and the fault."""
    if how == "no majority":
        with Cluster(3) as cluster:
            create_bucket(cluster.url, "b", 64, num_replicas=3)
            followers = cluster.followers_of("KV_b")
            fault = (
                lambda: [follower.kill() for follower in followers],
                lambda: [follower.start() for follower in followers],
            )
            leader = cluster.leader_of("KV_b").url
            yield leader, leader, fault
        return
    with NatsServer() as server, Proxy(server.port) as proxy:
        create_bucket(server.url, "b", 64)
        faults: dict[str, Fault] = {
            "refused": (server.kill, server.start),
            "packets dropped": (proxy.freeze, proxy.thaw),
            "half-open": (
                lambda: _upward(proxy, passes=False),
                lambda: _upward(proxy, passes=True),
            ),
        }
        yield server.url if how == "refused" else proxy.url, server.url, faults[how]


def _upward(proxy: Proxy, passes: bool) -> None:
    proxy.upward = lambda frame: passes


CASES = [
    ("refused", 4, "processingTime"),
    ("refused", 40, "availableNow"),
    ("refused", 200, "processingTime"),
    ("packets dropped", 4, "availableNow"),
    ("packets dropped", 40, "processingTime"),
    ("half-open", 4, "availableNow"),
    ("half-open", 40, "processingTime"),
    ("no majority", 40, "processingTime"),
]


@pytest.mark.parametrize(("how", "seconds", "trigger"), CASES)
def test_outage_matrix_reads_every_entry_once(
    spark: SparkSession, tmp_path: Path, how: str, seconds: int, trigger: str
) -> None:
    table = tmp_path / "table"
    merge = merge_changes(str(table))
    found: dict[int, list[int]] = {}
    began: list[float] = []
    ended: list[float] = []
    with place(how) as (url, direct, (leave, come_back)):
        put_many(direct, "b", ((f"k{i % 40}", b"%d" % i) for i in range(ROWS)))

        def back() -> None:
            time.sleep(seconds)
            ended.append(time.monotonic())
            come_back()

        returning = threading.Thread(target=back)

        def sink(batch: DataFrame, number: int) -> None:
            batch.persist()
            revisions = [row.revision for row in batch.collect()]
            merge(batch, number)
            # After the merge: the test stops the query when all entries are in `found`.
            found[number] = revisions
            batch.unpersist()
            if not began:
                leave()
                began.append(time.monotonic())
                returning.start()

        rows = spark.readStream.format("nats_kv").options(
            servers=url,
            bucket="b",
            includeHistory=True,
            maxRowsPerTrigger=PER_BATCH,
            connectTimeout=2,
            requestTimeout=2,
        )
        given = (
            {"availableNow": True} if trigger == "availableNow" else {trigger: "100 milliseconds"}
        )
        query = begin(
            rows.load()
            .writeStream.foreachBatch(sink)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(**given)
            .start
        )
        try:
            wait_until(
                lambda: sum(map(len, found.values())) >= ROWS,
                "all entries",
                alive=lambda: _alive(query),
                deadline=600,
            )
            last_batch = time.monotonic()
        finally:
            query.stop()
            if began:
                returning.join()
        assert began
        assert last_batch > ended[0] > began[0] + seconds - 0.1
        revisions = [revision for number in sorted(found) for revision in found[number]]
        assert revisions == list(range(1, ROWS + 1))
        present = {row["key"]: row["revision"] for row in read_batch(direct, bucket="b")}
        assert live(table) == present


def _alive(query: object) -> None:
    error = query.exception()  # type: ignore[attr-defined]
    if error is not None:
        raise error
