"""Writing wherever Spark runs: a batch, a streaming query, and a repeated micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from nats_stream_source.embedded import NatsServer
from nats_stream_source.spark.compat import ADMISSION_CONTROL
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.nats.streams import stream_state
from tests.support.spark.scenario import KV, STREAM

pytestmark = [pytest.mark.sparks]
if not ADMISSION_CONTROL:
    # PySpark 4.0 and 4.1 leave the sockets of `collect` to the garbage collector.
    pytestmark.append(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))

ROWS = 200
TARGETS = {
    KV: {"bucket": "to_kv", "ifMissing": "create", "history": "10"},
    STREAM: {"stream": "TO_STREAM", "ifMissing": "create", "subjects": "out.>"},
}


def frame_for(kind: str, frame: DataFrame) -> DataFrame:
    """The columns that the format writes, from those of ``nats_kv``."""
    if kind == KV:
        return frame.select("key", "value", "operation")
    return frame.selectExpr("concat('out.', key) AS subject", "value AS data")


def stored(server: NatsServer, kind: str) -> int:
    name = "KV_to_kv" if kind == KV else "TO_STREAM"
    return int(stream_state(server.url, name)["messages"])


@pytest.fixture(params=[KV, STREAM])
def kind(request: pytest.FixtureRequest, nats_server: NatsServer) -> str:
    create_bucket(nats_server.url, "origin", 64)
    put_many(nats_server.url, "origin", [(f"k{i % 50}", b"%d" % i) for i in range(ROWS)])
    return str(request.param)


def test_batch_is_written(spark: SparkSession, nats_server: NatsServer, kind: str) -> None:
    servers = {"servers": nats_server.url}
    source = spark.read.format(KV).options(**servers, bucket="origin", includeHistory="true")
    writer = frame_for(kind, source.load()).write.format(kind).mode("append")
    writer.options(**servers, **TARGETS[kind]).save()
    assert stored(nats_server, kind) == ROWS


def test_micro_batch_written_twice(
    spark: SparkSession, nats_server: NatsServer, kind: str, tmp_path: Path
) -> None:
    servers: dict[str, Any] = {"servers": nats_server.url}
    source = spark.readStream.format(KV).options(**servers, bucket="origin", includeHistory="true")

    def run() -> None:
        query = (
            frame_for(kind, source.load())
            .writeStream.format(kind)
            .queryName("copy")
            .options(**servers, **TARGETS[kind], messageId="auto")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    assert stored(nats_server, kind) == ROWS
    commits = tmp_path / "checkpoint" / "commits"
    for path in [*commits.iterdir()]:
        path.unlink()
    run()
    assert (commits / "0").exists(), "the micro-batch came again"
    assert stored(nats_server, kind) == ROWS, "and each of its rows is stored once"
