"""`follow` has asynchronous logs on each supported Spark, on a cluster and over Spark Connect."""

from __future__ import annotations

import importlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from nats_stream_source.delta import follow
from nats_stream_source.spark.session import is_connect
from tests.support.log_fields import parse_fields
from tests.support.spark.scenario import Create, Put, Scene, play
from tests.support.wait import wait_until

pytestmark = [pytest.mark.sparks]


class Keys:
    """In the place of a merge: the environments of these tests lack Delta Lake."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)

    def events(self, changes: DataFrame) -> None:
        pass

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        keys = [row.key for row in batch.collect()]
        Path(self._directory, str(batch_id)).write_text(json.dumps(keys))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Directory with the keys of each micro-batch."""
    directory = tmp_path / "keys"
    directory.mkdir()
    return directory


@pytest.fixture
def merges(keys: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each merge, in whose place `Keys` is."""
    merges: list[dict[str, Any]] = []

    def merge_changes(table: str, **arguments: Any) -> Keys:
        merges.append(arguments)
        return Keys(keys)

    module = importlib.import_module("nats_stream_source.delta.spark.follow")  # not the function
    monkeypatch.setattr(module, "merge_changes", merge_changes)
    return merges


def wait_for(key: str, keys: Path, query: StreamingQuery) -> None:
    def merged() -> bool:
        return any(key in one.read_text() for one in keys.iterdir())

    wait_until(merged, "the entry", 180, seen=query.exception)


def test_follow_has_asynchronous_logs(
    scene: Scene,
    tmp_path: Path,
    keys: Path,
    merges: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The option for `foreachBatch` is one that Spark does not document."""
    caplog.set_level(logging.INFO, "nats_stream_source.delta.spark.follow")
    play(scene, Create(), Put("a", "1"))
    source = scene.spark.readStream.format(scene.format).options(**scene.source)
    checkpoint = tmp_path / "checkpoint"
    query = follow(source.load(), "lake/fleet", checkpoint=str(checkpoint), deletes="mark")
    try:
        wait_for("a", keys, query)
        progress = query.lastProgress
        if not is_connect(scene.spark):
            execution = query._jsq.streamingQuery().getClass().getSimpleName()
            assert execution == "AsyncProgressTrackingMicroBatchExecution"
    finally:
        query.stop()
    assert progress is None or "walCommit" in progress["durationMs"]
    (line,) = caplog.messages
    assert parse_fields(line)["logs"] == "asynchronous"
    assert merges == [{"deletes": "mark"}]


@pytest.mark.usefixtures("merges")
@pytest.mark.skipif(os.environ.get("SPARK_PLACE", "local") != "local", reason="a Spark each")
@pytest.mark.xfail(
    pyspark.__version__ == "4.3.0", reason="Spark fails while it cleans up", strict=True
)
def test_stopped_query_starts_again(scene: Scene, tmp_path: Path, keys: Path) -> None:
    play(scene, Create())
    for number in range(3):
        play(scene, Put(f"k{number}", "1"))
        source = scene.spark.readStream.format(scene.format).options(**scene.source)
        query = follow(source.load(), "lake/fleet", checkpoint=str(tmp_path / "checkpoint"))
        try:
            wait_for(f"k{number}", keys, query)
        finally:
            query.stop()
        assert scene.spark.streams.active == []
