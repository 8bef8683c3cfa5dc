"""``examples/pipeline``: an update by ``spark-pipelines`` of this environment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from examples.pipeline.__main__ import entries, view, write_first
from examples.pipeline.project import prepare, update
from nats_stream_source.embedded import NatsServer
from tests.support.spark.session import program_environment


def test_views_and_sink_after_update(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = program_environment(tmp_path / "conf")
    environment["SPARK_TESTING"] = "0"  # a free port for the Connect server
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    asyncio.run(write_first(nats_server.url))
    update(prepare(tmp_path), nats_server.url)
    bucket = asyncio.run(entries(nats_server.url, "fleet"))
    assert {row["plane"]: row["airport"] for row in view(tmp_path, "fleet")} == bucket
    assert [row["reports"] for row in view(tmp_path, "delays")] == [1, 1]
    assert asyncio.run(entries(nats_server.url, "late")) == {"plane.1.1": "75"}
