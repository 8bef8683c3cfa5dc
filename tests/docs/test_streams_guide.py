"""The examples of docs/streams.md run, and print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import bucket_state, create_bucket, publish, put
from tests.support.nats.streams import create_stream
from tests.support.paths import ROOT
from tests.support.spark.streaming_query import run_to_the_end
from tests.support.wait import wait_until

PAGE = (ROOT / "docs/streams.md").read_text()


def test_examples(spark: SparkSession, shared_server: NatsServer, tmp_path: Path) -> None:
    url = shared_server.url
    create_stream(url, "ORDERS", "orders.>")
    publish(
        url,
        [
            ("orders.eu.1", b"one", {"Trace-Id": "x"}),
            ("orders.asia.1", b"two", None),
            ("orders.us.1", b"three", None),
        ],
    )
    create_bucket(url, "fleet")
    transform = {"src": "$KV.fleet.>", "dest": "$KV.all-sites.fleet.>"}
    sources = [{"name": "KV_fleet", "subject_transforms": [transform]}]
    create_bucket(url, "all-sites", sources=sources)
    put(url, "fleet", "v1", b"")
    wait_until(lambda: bucket_state(url, "all-sites")["messages"] == 1, "the sourced entry")
    first, traced, everywhere, looked_up, replayed = re.findall(
        r"```python\n(.*?)```", PAGE, re.DOTALL
    )
    names: dict[str, Any] = {"spark": spark}

    def run(example: str, name: str) -> list[Row]:
        exec(example.replace("nats://127.0.0.1:4222", url), names)
        return rows(names[name], tmp_path / f"{len(list(tmp_path.iterdir()))}")

    exec(first.replace("nats://127.0.0.1:4222", url), names)
    assert run(traced, "traced") == [Row(sequence=1, trace="x"), Row(sequence=3, trace=None)]
    (entry,) = run(everywhere, "everywhere")
    assert (entry.key, entry.origin_stream, entry.origin_sequence) == ("fleet.v1", "KV_fleet", 1)
    assert [row.sequence for row in run(looked_up, "orders")] == [1, 2, 3]
    assert [bytes(row.data) for row in run(replayed, "replayed")] == [b"three"]


def rows(frame: DataFrame, checkpoint: Path) -> list[Row]:
    """All that the stream has now."""
    found: list[Row] = []
    writes = (
        frame.writeStream.foreachBatch(lambda batch, _: found.extend(batch.collect()))
        .trigger(availableNow=True)
        .option("checkpointLocation", str(checkpoint))
    )
    run_to_the_end(writes.start)
    return found
