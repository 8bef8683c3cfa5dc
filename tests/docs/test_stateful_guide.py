"""The examples of docs/stateful.md run, and return what the page shows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from nats_stream_source.embedded import NatsServer
from tests.docs.pages import blocks, rows_now
from tests.support.nats.buckets import create_bucket, delete, publish, put_many
from tests.support.nats.streams import create_stream
from tests.support.spark.streaming_query import begin
from tests.support.wait import wait_until

DEADLINE = 300.0  # seconds, for two queries that start on a busy machine
STORE = "spark.sql.streaming.stateStore.providerClass"
SHORTER = {'"1 minute"': '"1 second"', '"10 seconds"': '"0 seconds"', "600_000": "1_000"}


@pytest.fixture
def examples(spark: SparkSession, shared_server: NatsServer) -> Iterator[dict[str, Any]]:
    """The names that the page defines, with windows and timers of a second."""
    url = shared_server.url
    create_bucket(url, "fleet", 10)
    for name in ("ORDERS", "PAYMENTS"):
        create_stream(url, name, f"{name.lower()}.>")
    code = "\n".join(blocks("stateful", "python", url=url))
    for long, short in SHORTER.items():
        assert long in code
        code = code.replace(long, short)
    before = spark.conf.get(STORE)
    names: dict[str, Any] = {"spark": spark, "__name__": "__main__", "url": url}
    exec(code, names)
    yield names
    assert before is not None
    spark.conf.set(STORE, before)


def test_windows_joins_and_deduplication(examples: dict[str, Any], tmp_path: Path) -> None:
    url = examples["url"]
    put_many(url, "fleet", [("window.1", b""), ("window.2", b"")])
    second = int(time.time())
    wait_until(lambda: time.time() >= second + 1, "a window later")
    put_many(url, "fleet", [("window.3", b"")])
    windows = rows_now(examples["changes"], tmp_path / "windows")
    assert sum(row.changes for row in windows) == 2, "the last window is still open"

    orders = ["orders.eu.large.1", "orders.eu.small.2", "orders.us.large.3", "orders.us.small.4"]
    publish(url, [(subject, b"", None) for subject in orders])
    publish(url, [(f"payments.{number}", b"", None) for number in (3, 1, 9)])
    settled = rows_now(examples["settled"], tmp_path / "settled")
    assert sorted(row.id for row in settled) == ["1", "3"]
    assert all(row.placed <= row.paid for row in settled)
    watched = rows_now(examples["watched"], tmp_path / "watched")
    assert sorted(row.subject for row in watched) == orders[:3]


def test_transform_with_state(examples: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf", reason="the extra `dev` installs it")
    url = examples["url"]
    found: dict[str, list[Row]] = {"busy": [], "silent": []}
    batches: list[int] = []

    def collect(rows: list[Row]) -> Callable[[DataFrame, int], None]:
        def function(batch: DataFrame, number: int) -> None:
            rows.extend(batch.collect())
            batches.append(number)

        return function

    put_many(url, "fleet", [(f"{key}.truck", b"") for key in ("parked", "sold", "driven")])
    delete(url, "fleet", "sold.truck")
    queries = [
        begin(
            examples[name]
            .where("key LIKE '%.truck'")
            .writeStream.foreachBatch(collect(rows))
            .option("checkpointLocation", str(tmp_path / name))
            .start
        )
        for name, rows in found.items()
    ]

    def alive() -> None:
        for query in queries:
            if (error := query.exception()) is not None:
                raise error

    def silent_keys() -> list[str]:
        return sorted(row.key for row in found["silent"])

    try:
        wait_until(
            lambda: len(silent_keys()) == 2 and batches.count(0) == 2,
            "two silent keys",
            DEADLINE,
            alive=alive,
        )
        assert silent_keys() == ["driven.truck", "parked.truck"]
        revisions = put_many(url, "fleet", [("driven.truck", b"")] * 5)
        wait_until(
            lambda: len(silent_keys()) > 2 and len(found["busy"]) > 1,
            "driven again",
            DEADLINE,
            alive=alive,
        )
    finally:
        for query in queries:
            query.stop()
    assert [row.revision for row in found["busy"]] == revisions[3:]
    last = {row.key: row.last for row in found["silent"]}
    assert last["driven.truck"] > last["parked.truck"]
