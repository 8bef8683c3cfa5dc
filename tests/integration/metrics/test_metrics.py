"""Metrics of real queries equal what was put, merged, written, lost and waited for."""

from __future__ import annotations

import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession, functions as F
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from nats_stream_source import metrics, register, watch_progress
from nats_stream_source.delta import follow
from nats_stream_source.embedded import NatsServer, free_port
from nats_stream_source.jetstream.times import nanoseconds
from tests.integration.delta.merge_model import Bucket, live, stored
from tests.support.prometheus import close_endpoints, scrape, value
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import Sequences
from tests.support.spark.streaming_query import begin, report_each_second
from tests.support.wait import wait_until

LOGGER = "nats_stream_source.metrics"


class Metrics:
    """An endpoint without the counts of earlier queries, and the queries and listeners of a test.

    Attributes:
        port: the port of the endpoint.
    """

    def __init__(self, spark: SparkSession) -> None:
        self.port = free_port()
        self._spark = spark
        self._listeners: list[StreamingQueryListener] = []
        self._queries: list[StreamingQuery] = []

    def watch(self, watched: SparkSession | StreamingQuery) -> StreamingQueryListener:
        self._listeners.append(watch_progress(watched, prometheus=self.port))
        return self._listeners[-1]

    def query(self, start: Callable[[], StreamingQuery]) -> StreamingQuery:
        self._queries.append(begin(start))
        return self._queries[-1]

    def run_to_end(self, writer: DataStreamWriter, tmp_path: Path) -> None:
        """Run a query over all that its source has."""
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        assert self.query(writer.trigger(availableNow=True).start).awaitTermination(180)

    def now(self, name: str, /, **labels: Any) -> float | None:
        return value(scrape(self.port), name, **labels)

    def wait(
        self, query: StreamingQuery | None, name: str, amount: float, /, **labels: Any
    ) -> None:
        """Wait until the metric has reached an amount, while the query runs if it is given."""
        wait(lambda: (self.now(name, **labels) or 0) >= amount, f"{amount} {name}", query)

    def close(self) -> None:
        for query in self._queries:
            query.stop()
        for listener in self._listeners:
            self._spark.streams.removeListener(listener)
        close_endpoints()


@pytest.fixture
def of_test(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[Metrics]:
    """The metrics of a test, whose idle queries report each second."""
    monkeypatch.setattr(metrics, "_recorder", None)
    register(spark, check=False)
    found = Metrics(spark)
    with report_each_second(spark):
        yield found
    found.close()


def changes(spark: SparkSession, bucket: Bucket, **options: Any) -> DataFrame:
    source = spark.readStream.format("nats_kv").options(servers=bucket.url, bucket=bucket.name)
    return source.options(**options).load()


def wait(condition: Callable[[], bool], what: str, query: StreamingQuery | None) -> None:
    def alive() -> None:
        assert query is None or query.isActive, query.exception()

    wait_until(condition, what, 180, alive=alive)


def test_follow_counts_rows_merges_outages_and_data_losses(
    spark: SparkSession, nats_server: NatsServer, tmp_path: Path, of_test: Metrics
) -> None:
    bucket, table = Bucket(nats_server.url, "fleet").create(), tmp_path / "fleet"
    bucket.write(("a", "PUT"), ("b", "PUT"), ("c", "PUT"))
    query = of_test.query(
        lambda: follow(
            changes(spark, bucket, failOnDataLoss="false", connectTimeout="2"),
            str(table),
            checkpoint=f"{table}-checkpoint",
            prometheus=f"127.0.0.1:{of_test.port}",
        )
    )
    of = {"query": query.id}
    of_test.wait(query, "input_rows_total", 3, **of)
    bucket.write(("a", "PUT"), ("b", "DEL"))
    of_test.wait(query, "input_rows_total", 5, **of)
    wait(lambda: live(table) == {"a": 4, "c": 3}, "the table", query)

    now = scrape(of_test.port)
    merged = {**of, "table": table}
    assert value(now, "query_active", **of) == 1
    assert value(now, "input_rows_total", source=0, **of) == 5
    assert value(now, "input_bytes_total", stream="KV_fleet", **of) > 0  # type: ignore[operator]
    rows = {change: value(now, "merged_rows_total", change=change, **merged) for change in CHANGES}
    assert rows == {"inserted": 3, "updated": 1, "deleted": 1}
    merges = value(now, "merges_total", engine="driver", **merged)
    assert merges == value(now, "merges_total")
    assert merges in (2, 3)  # two batches, or three if the two writes were seen one by one
    assert value(now, "freshness_seconds_count", **merged) == merges
    newest = nanoseconds(bucket.state()["last_ts"]) / 1e9
    assert value(now, "newest_row_timestamp_seconds", **merged) == pytest.approx(newest, abs=1e-5)
    assert value(now, "table_files", **merged) == len(list(table.glob("*.parquet")))
    assert value(now, "index_keys", **merged) == 3
    written = value(now, "written_bytes_total", **merged)
    on_disk = sum(one.stat().st_size for one in table.rglob("*") if one.is_file())
    # All files of the table but its first version and checksum files.
    assert written == pytest.approx(on_disk, rel=0.5)
    assert value(now, "offsets_behind_latest", stream="KV_fleet", **of) == 0
    assert value(now, "max_offsets_behind_latest", source=0, **of) == 0
    steps = {labels["step"] for labels, _ in now["batch_step_seconds_count"]}
    assert {"triggerExecution", "addBatch", "latestOffset"} <= steps
    assert value(now, "outages_total", process="planner", **of) == 0
    assert "data_losses_accepted_total" not in now

    # An outage, which the planner waits out; meanwhile the bucket is re-created. The planner waits
    # for connectTimeout before it calls it one.
    nats_server.terminate()
    wait(lambda: silent_seconds(of_test, of) > 8, "the planner to wait", query)
    with NatsServer(store=nats_server.store) as other:
        again = Bucket(other.url, "fleet")
        again.delete()
        again.create()
        again.write(("e", "PUT"))
    nats_server.start()
    of_test.wait(query, "input_rows_total", 6, **of)
    now = scrape(of_test.port)
    assert value(now, "outages_total", process="planner", **of) == 1
    assert value(now, "outage_seconds_total", process="planner", **of) > 0  # type: ignore[operator]
    assert value(now, "retries_total", process="planner", **of) >= 1  # type: ignore[operator]
    losses = value(now, "data_losses_accepted_total", stream="KV_fleet", process="planner", **of)
    assert losses == 1

    # The table is removed under the query, which creates it again.
    shutil.rmtree(table)
    bucket.write(("f", "PUT"))
    wait(lambda: (table / "_delta_log").exists() and live(table) == {"f": 2}, "the table", query)
    wait(lambda: of_test.now("index_keys", **merged) == 1, "the new table's index", query)
    assert of_test.now("table_files", **merged) == 1
    assert of_test.now("query_active", **of) == 1

    query.stop()
    wait_until(lambda: of_test.now("query_active", **of) == 0, "the end of the query", 60)
    # Spark counts the rows of the batch twice that was read again for the new table. The event of
    # the last micro-batch may arrive after Spark reports that the query is not active.
    of_test.wait(None, "input_rows_total", 8, **of)
    ended = scrape(of_test.port)
    assert value(ended, "input_rows_total", **of) == 8
    for gauge in ("offsets_behind_latest", "table_files", "last_report_timestamp_seconds"):
        assert value(ended, gauge, **of) is None
    assert value(ended, "query_failures_total", **of) is None


def test_contradicted_sequences_are_counted(
    spark: SparkSession, url: str, tmp_path: Path, of_test: Metrics
) -> None:
    bucket, table = Bucket(url, "contradicted").create(), tmp_path / "table"
    bucket.write(("a", "PUT"), ("b", "PUT"), ("a", "PUT"))
    query = follow(
        changes(spark, bucket, includeHistory="true"),
        table,
        checkpoint=f"{table}-checkpoint",
        keys="key",
        sequence_by="stream_created",  # the same for all entries
        column_list=["key", "revision"],
        once=True,
        prometheus=f"127.0.0.1:{of_test.port}",
    )
    assert query.awaitTermination(180)
    merged = {"query": query.id, "table": table}
    of_test.wait(None, "merges_total", 1, **merged)
    assert of_test.now("contradicted_sequences_total", **merged) == 1


def silent_seconds(of_test: Metrics, of: dict[str, Any]) -> float:
    return time.time() - (of_test.now("last_report_timestamp_seconds", **of) or 0)


def logged(caplog: pytest.LogCaptureFixture, text: str) -> int:
    lines = [one.getMessage() for one in caplog.records if one.name == LOGGER]
    return sum(text in line for line in lines)


CHANGES = ("inserted", "updated", "deleted")


def test_lag_is_rows_and_bytes_behind_and_second_query_of_name_has_its_id(
    spark: SparkSession,
    url: str,
    tmp_path: Path,
    of_test: Metrics,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    bucket = Bucket(url, "lagging").create()
    bucket.write(*((f"k{number}", "PUT") for number in range(10)))
    go_on = threading.Event()
    of_test.watch(spark)

    def hold(batch: DataFrame, batch_id: int) -> None:
        batch.count()
        if batch_id == 1:
            assert go_on.wait(180)

    def start(session: SparkSession, name: str) -> StreamingQuery:
        frame = changes(session, bucket, includeHistory="true", maxRowsPerTrigger="4")
        writer = frame.writeStream.queryName("twin").foreachBatch(hold)
        return of_test.query(writer.option("checkpointLocation", str(tmp_path / name)).start)

    first = start(spark, "first")
    lag = {"query": "twin", "stream": "KV_lagging"}
    wait(lambda: of_test.now("offsets_behind_latest", **lag) == 6, "the lag", first)
    now = scrape(of_test.port)
    state = bucket.state()
    assert value(now, "estimated_bytes_behind_latest", **lag) == 6 * state["bytes"] // 10
    assert value(now, "estimated_total_bytes_behind_latest", query="twin", source=0) == (
        6 * state["bytes"] // 10
    )
    assert value(now, "seconds_behind_latest", **lag) >= 0  # type: ignore[operator]
    for name in ("min", "max", "avg"):
        assert value(now, f"{name}_offsets_behind_latest", query="twin", source=0) == 6

    # Another session of the process may have a query of the same name; its own listener starts
    # after its first micro-batch and takes over what Spark has kept of it.
    other = spark.newSession()
    register(other, check=False)
    second = start(other, "second")
    wait(lambda: second.lastProgress is not None, "a micro-batch of the second query", second)
    of_test.watch(second)
    label = f"twin {str(second.id)[:8]}"
    assert of_test.now("offsets_behind_latest", query=label) == 6
    assert of_test.now("input_rows_total", query=label) == 4
    assert any("two queries have one name" in one.getMessage() for one in caplog.records)
    of_test.watch(second)  # a second listener counts nothing again
    go_on.set()
    for query, name in ((first, "twin"), (second, label)):
        of_test.wait(query, "input_rows_total", 10, query=name)
        assert of_test.now("input_rows_total", query=name) == 10
    started = [one for one in caplog.records if one.getMessage().startswith("metrics are served")]
    assert len(started) == 1
    second.stop()
    of_test.watch(second)  # a query that has ended
    wait_until(lambda: of_test.now("query_active", query=label) == 0, "its end", 60)


def test_query_whose_end_no_listener_receives_is_not_active(
    spark: SparkSession, url: str, of_test: Metrics
) -> None:
    """As after a stream thread that dies before it reports its end."""
    bucket = Bucket(url, "unreported").create()
    bucket.write(("a", "PUT"))
    listener = of_test.watch(spark)
    writer = changes(spark, bucket).writeStream.format("noop").queryName("unreported")
    query = of_test.query(writer.start)
    lag = {"query": "unreported", "stream": "KV_unreported"}
    wait(lambda: of_test.now("offsets_behind_latest", **lag) == 0, "the row", query)
    assert of_test.now("query_active", query="unreported") == 1
    spark.streams.removeListener(listener)
    query.stop()
    now = scrape(of_test.port)
    assert value(now, "query_active", query="unreported") == 0
    assert value(now, "offsets_behind_latest", **lag) is None, "as after a reported end"
    assert value(now, "input_rows_total", query="unreported") == 1


def test_rebuild_on_executor_is_counted_by_reason(
    spark: SparkSession, shared_server: NatsServer, tmp_path: Path, of_test: Metrics
) -> None:
    bucket = Bucket(shared_server.url, "rebuilt").create()
    bucket.write(*((f"k{number}", "PUT") for number in range(200)))
    of_test.watch(spark)
    with Proxy(shared_server.port, Sequences([100])) as proxy:
        source = spark.readStream.format("nats_kv").options(servers=proxy.url, bucket=bucket.name)
        writer = source.load().writeStream.format("noop").queryName("rebuilt")
        of_test.run_to_end(writer, tmp_path)
        assert len(proxy.dropped) == 1
    of = {"query": "rebuilt", "stream": "KV_rebuilt"}
    of_test.wait(None, "input_rows_total", 200, query="rebuilt")
    of_test.wait(None, "consumer_rebuilds_total", 1, **of)
    assert of_test.now("input_rows_total", query="rebuilt") == 200
    assert of_test.now("consumer_rebuilds_total", reason="gap", **of) == 1
    processes = {label["process"] for label, _ in scrape(of_test.port)["consumer_rebuilds_total"]}
    assert processes == {"executor"}


def test_sink_counts_rows_acknowledgements_and_conflicts(
    spark: SparkSession, url: str, tmp_path: Path, of_test: Metrics
) -> None:
    source = Bucket(url, "sink_source").create()
    target = Bucket(url, "sink_target").create()
    source.write(*((f"k{number}", "PUT") for number in range(5)))
    target.write(("k1", "PUT"))
    of_test.watch(spark)
    rows = changes(spark, source).select(
        "key", "value", F.when(F.col("key") < "k4", F.lit(0)).alias("expected_revision")
    )
    writer = (
        rows.writeStream.format("nats_kv")
        .options(servers=target.url, bucket=target.name, onConflict="skip")
        .queryName("copy")
    )
    of_test.run_to_end(writer, tmp_path)
    of = {"query": "copy", "target": "sink_target"}
    now = scrape(of_test.port)
    assert value(now, "sink_rows_total", **of) == 5
    assert value(now, "sink_pub_acks_total", **of) == 4
    assert value(now, "sink_conflicts_total", **of) == 1
    assert value(now, "sink_duplicates_total", **of) is None


def test_endpoint_that_cannot_listen_and_failing_recorder_leave_query_unharmed(
    spark: SparkSession,
    url: str,
    tmp_path: Path,
    of_test: Metrics,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bucket, table = Bucket(url, "unharmed").create(), tmp_path / "fleet"
    bucket.write(("a", "PUT"))

    def fail(*arguments: object) -> None:
        raise RuntimeError("the exporter failed")

    with socket.create_server(("127.0.0.1", of_test.port)), monkeypatch.context() as patch:
        # Not of the class: a listener of an earlier query has its own recorder and would warn too.
        patch.setattr(metrics.start_recorder(), "add", fail)
        query = of_test.query(
            lambda: follow(
                changes(spark, bucket),
                str(table),
                checkpoint=f"{table}-checkpoint",
                prometheus=f"127.0.0.1:{of_test.port}",
            )
        )
        wait(lambda: (table / "_delta_log").exists() and bool(stored(table)), "a row", query)
        wait(lambda: logged(caplog, "metrics could not be recorded") > 0, "the warning", query)
    assert logged(caplog, "metrics could not be recorded") == 1
    assert logged(caplog, "could not listen") == 1
    assert query.isActive
