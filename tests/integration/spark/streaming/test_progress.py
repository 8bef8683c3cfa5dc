"""Progress records from reports as Spark writes them and from real queries, and log lines."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.logger.logger import JSONFormatter
from pyspark.sql import SparkSession

from nats_stream_source import watch_progress
from nats_stream_source.cli.main import main
from nats_stream_source.logs import field_logger, format_fields
from nats_stream_source.spark.progress import BatchProgress, records
from tests.support.log_fields import parse_fields
from tests.support.nats import buckets
from tests.support.nats.streams import create_stream
from tests.support.spark.scenario import DEADLINE
from tests.support.spark.streaming_query import begin
from tests.support.wait import wait_until

_serial = itertools.count()


# What Spark 4.2.0 reported of a query with maxRowsPerTrigger=10 on a bucket of 100 sequences, 40 of
# them left, shortened.
END = {
    "v": 1,
    "stream": "KV_b",
    "created": "2026-11-21T08:32:05.12294248Z",
    "epoch": 0,
    "origin": 0,
    "stream_seq": 70,
    "time": "2026-11-21T08:32:05.147644568Z",
    "consumer_seq": 10,
    "initial_through": 100,
    "filter": [],
}
NEWEST = {"stream_seq": 100, "time": "2026-11-21T08:32:06.647644568Z", "consumer_seq": 40}
REPORT: dict[str, Any] = {
    "id": "55453377-6eec-4a49-b425-8c99fc37c0fd",
    "runId": "9bbd01d8-497b-4411-880f-a2d5d3a31e04",
    "name": "fleet",
    "timestamp": "2026-11-21T08:32:13.669Z",
    "batchId": 0,
    "batchDuration": 9860,
    "numInputRows": 10,
    "durationMs": {"addBatch": 379, "latestOffset": 32, "triggerExecution": 500, "walCommit": 97},
    "sources": [
        {
            "description": "org.apache.spark.sql.execution.datasources.v2.python.Python…@181ac03f",
            "startOffset": None,
            "endOffset": END,
            "latestOffset": {**END, **NEWEST},
            "numInputRows": 10,
        }
    ],
}


def report(
    start: dict[str, Any] | None = None,
    end: dict[str, Any] | None = None,
    newest: dict[str, Any] | None = None,
    **source: Any,
) -> dict[str, Any]:
    """The report with changes to the offsets of its source, which has texts for them here."""
    changed: dict[str, Any] = json.loads(json.dumps(REPORT))
    (one,) = changed["sources"]
    if start is not None:
        one["startOffset"] = json.dumps({**one["endOffset"], **start})
    one["endOffset"] = json.dumps({**one["endOffset"], **(end or {})})
    one["latestOffset"] = json.dumps({**one["latestOffset"], **(newest or {})})
    one.update(source)
    return changed


def test_first_batch_progress() -> None:
    (record,) = records(REPORT)
    assert record == BatchProgress(
        query="fleet",
        batch=0,
        source=0,
        stream="KV_b",
        start=0,
        end=70,
        rows=10,
        seconds=0.5,
        lag=30,
        lag_seconds=1.5,
        compacted=60,
        initial=True,
        epoch=0,
    )
    assert record.rows_per_second == 20


def one(**changes: Any) -> BatchProgress:
    (record,) = records(report(**changes))
    return record


def test_later_batch_progress() -> None:
    end = {"stream_seq": 120, "consumer_seq": 60}
    newest = {"stream_seq": 125, "consumer_seq": 65}
    record = one(start={"stream_seq": 100, "consumer_seq": 40}, end=end, newest=newest)
    assert (record.start, record.end, record.lag) == (100, 120, 5)
    assert (record.compacted, record.initial) == (10, False)


def test_unknown_fields_are_null() -> None:
    assert one(latestOffset=None).lag is None
    assert one(end={"filter": ["k.>"]}).compacted is None
    assert one(newest={"time": None}).lag_seconds is None
    # Counts of two epochs have nothing to do with each other.
    assert one(newest={"epoch": 1}).lag is None
    # Spark counts rows as often as a sink reads them.
    assert one(numInputRows=140).compacted == 0


def test_new_epoch_starts_at_its_origin() -> None:
    record = one(start={"stream_seq": 500}, end={"epoch": 1, "origin": 20})
    assert (record.start, record.end) == (20, 70)


def test_sources_of_other_packages_are_ignored() -> None:
    mixed = report()
    mixed["sources"] = [
        {"startOffset": None, "endOffset": 7, "latestOffset": 8, "numInputRows": 1},
        {"startOffset": None, "endOffset": '{"t": {"0": 3}}', "latestOffset": None},
        {"startOffset": None, "endOffset": "not JSON", "latestOffset": None},
        *mixed["sources"],
    ]
    assert [record.source for record in records(mixed)] == [3]


# -- real queries -------------------------------------------------------------------------------


class Watched:
    """Queries whose progress is watched."""

    def __init__(self, spark: SparkSession) -> None:
        self._seen: list[BatchProgress] = []
        self._spark = spark
        self._listener = watch_progress(spark, self._seen.append)

    def run(self, checkpoint: Path, format: str, **options: str) -> list[BatchProgress]:
        """Run a query to its end; its records, the same from its own reports and the listener."""
        query = begin(
            self._spark.readStream.format(format)
            .options(**options)
            .load()
            .writeStream.format("noop")
            .queryName(f"q{next(_serial)}")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start
        )
        assert query.awaitTermination(int(DEADLINE))
        found = [record for progress in query.recentProgress for record in records(progress)]

        def seen() -> list[BatchProgress]:
            # The reports of a query of an earlier test can arrive late.
            return [record for record in self._seen if record.query == query.name]

        wait_until(lambda: len(seen()) >= len(found), "the listener's records", deadline=600)
        assert seen() == found
        assert {record.query for record in found} == {query.name}
        return found

    def close(self) -> None:
        self._spark.streams.removeListener(self._listener)


@pytest.fixture
def watched(spark: SparkSession) -> Iterator[Watched]:
    watched = Watched(spark)
    try:
        yield watched
    finally:
        watched.close()


def inspected(
    checkpoint: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, int, int]:
    """What the command prints of Spark's own checkpoint: the last batch, its end, the lag."""
    capsys.readouterr()
    assert main(["inspect", str(checkpoint), "--servers", url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (source,) = report["sources"]
    return report["committed_batch"], source["committed"]["stream_seq"], source["lag"]


def test_lag_of_bucket(
    watched: Watched,
    url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """30 sequences, of which 10 are left; then 3 more."""
    buckets.fill_bucket(url, "lag", ((f"k{i % 10}", b"v") for i in range(30)), 1)
    options = {"servers": url, "bucket": "lag", "maxRowsPerTrigger": "4"}
    with caplog.at_level(logging.INFO, "nats_stream_source.progress"):
        found = watched.run(tmp_path, "nats_kv", **options)
    assert [(record.rows, record.lag) for record in found] == [(4, 6), (4, 2), (2, 0)]
    assert [(record.start, record.end) for record in found] == [(0, 24), (24, 28), (28, 30)]
    assert sum(record.compacted or 0 for record in found) == 20
    assert all(record.initial and record.stream == "KV_lag" for record in found)
    assert all(record.seconds > 0 for record in found)
    messages = (r.getMessage() for r in caplog.records if r.name == "nats_stream_source.progress")
    lines = [line for line in messages if f"query={found[0].query} " in line]
    assert len(lines) == 3
    assert "micro-batch" in lines[0]
    assert "stream=KV_lag start=0 end=24 rows=4" in lines[0]
    assert "lag=6" in lines[0]
    buckets.put_many(url, "lag", ((f"n{i}", b"v") for i in range(3)))
    assert inspected(tmp_path, url, capsys) == (2, 30, 3)
    (last,) = watched.run(tmp_path, "nats_kv", **options)
    assert inspected(tmp_path, url, capsys) == (3, 33, 0)
    assert (last.batch, last.rows, last.lag, last.compacted, last.initial) == (3, 3, 0, 0, False)


def test_lag_of_each_bucket(
    watched: Watched,
    url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two of three have entries: 30 and 10, of which a micro-batch reads 8."""
    for name, count in (("lag-a", 30), ("lag-b", 10), ("lag-c", 0)):
        buckets.fill_bucket(url, name, ((f"k{i}", b"v") for i in range(count)))
    options = {"servers": url, "bucketPattern": "lag-.", "maxRowsPerTrigger": "8"}
    found = watched.run(tmp_path, "nats_kv", **options)
    first = [(one.stream, one.start, one.end, one.rows, one.lag) for one in found[:2]]
    assert first == [("KV_lag-a", 0, 6, None, 24), ("KV_lag-b", 0, 2, None, 8)]
    assert {record.batch for record in found} == set(range(5))
    assert {record.stream for record in found} == {"KV_lag-a", "KV_lag-b"}
    assert [(one.stream, one.end, one.lag) for one in found[-2:]] == [
        ("KV_lag-a", 30, 0),
        ("KV_lag-b", 10, 0),
    ]
    buckets.put_many(url, "lag-b", ((f"n{i}", b"v") for i in range(3)))
    assert main(["inspect", str(tmp_path), "--servers", url, "--max-lag", "2", "--json"]) == 1
    sources = json.loads(capsys.readouterr().out)["sources"]
    shown = [(one["source"], one["bucket"], one["lag"], one["problem"]) for one in sources]
    assert shown == [("0", "lag-a", 0, None), ("0", "lag-b", 3, None), ("0", "lag-c", 0, None)]
    assert main(["inspect", str(tmp_path), "--servers", url]) == 0
    assert "source 0: bucket lag-b, stream KV_lag-b, made" in capsys.readouterr().out
    (last,) = watched.run(tmp_path, "nats_kv", **options)
    assert (last.stream, last.rows, last.start, last.end, last.lag) == ("KV_lag-b", 3, 10, 13, 0)
    assert last.rows_per_second


def test_lag_of_stream_with_filter(watched: Watched, url: str, tmp_path: Path) -> None:
    create_stream(url, "LAG", "lag.>")
    subjects = ("lag.a", "lag.b", "lag.b")
    buckets.publish(url, [(subjects[i % 3], b"", None) for i in range(30)])
    options = {"servers": url, "stream": "LAG", "maxRowsPerTrigger": "6"}
    found = watched.run(tmp_path, "nats_stream", **options, filterSubjects="lag.a")
    # The planner counts an upper bound of the rows of a range: the lag is a lower bound.
    assert [(record.rows, record.lag) for record in found] == [(4, 6), (6, 0)]
    assert [record.compacted for record in found] == [None, None]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": "KV_fleet", "start": "0"},
        {"error": 'no "answer" in 5 s\nat all', "path": "C:\\a b"},
        {"a": "b=c", "d": "100%", "e": "%s", "f": "\\", "g": "gap,"},
    ],
)
def test_fields_are_read_back(fields: dict[str, str]) -> None:
    assert parse_fields(f"12:00 WARN something happened {format_fields(fields)}") == fields


def test_log_line_has_fields(caplog: pytest.LogCaptureFixture) -> None:
    log = field_logger("some.module")
    log.warning("100% sure", stream="KV_a", error=ValueError("a b"), detail="", seq=None)
    log.warning("plain %d", 7)
    first, second = caplog.records
    assert first.getMessage() == '100% sure stream=KV_a error="a b"'
    assert first.name == "some.module"
    assert first.filename == Path(__file__).name  # not the logger's own
    assert second.getMessage() == "plain 7"
    shown = json.loads(JSONFormatter().format(first))
    assert shown["context"] == {"stream": "KV_a", "error": "a b"}


def test_control_characters_do_not_reach_terminal() -> None:
    assert format_fields({"detail": "\x1b[2J"}) == 'detail="\\u001b[2J"'
