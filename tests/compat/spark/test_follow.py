"""`follow` has asynchronous logs on each supported Spark, on a cluster and over Spark Connect."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from nats_stream_source.delta import follow
from nats_stream_source.delta.session import is_connect
from tests.support.log_fields import parse_fields
from tests.support.spark.scenario import Create, Put, Scene, play
from tests.support.wait import wait_until

pytestmark = [pytest.mark.sparks]


class Keys:
    """In the place of a merge: the environments of these tests lack Delta Lake."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)

    def validate(self, columns: list[str]) -> None:
        pass

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        keys = [row.key for row in batch.collect()]
        Path(self._directory, str(batch_id)).write_text(json.dumps(keys))


def test_follow_has_asynchronous_logs(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The option for `foreachBatch` is one that Spark does not document."""
    caplog.set_level(logging.INFO, "nats_stream_source.delta.follow")
    keys = tmp_path / "keys"
    keys.mkdir()
    merges: list[dict[str, Any]] = []

    def merge_changes(table: str, **arguments: Any) -> Keys:
        merges.append(arguments)
        return Keys(keys)

    module = importlib.import_module("nats_stream_source.delta.follow")  # not the function
    monkeypatch.setattr(module, "merge_changes", merge_changes)
    play(scene, Create(), Put("a", "1"))
    source = scene.spark.readStream.format(scene.format).options(**scene.source)
    checkpoint = tmp_path / "checkpoint"
    query = follow(source.load(), "lake/fleet", checkpoint=str(checkpoint), deletes="mark")
    try:
        wait_until(
            lambda: any("a" in one.read_text() for one in keys.iterdir()),
            "the entry",
            180,
            seen=query.exception,
        )
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
