"""The examples of docs/writing.md run, and have the results that the page describes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from tests.support.nats.streams import create_stream, stream_state
from tests.support.paths import ROOT
from tests.support.query_driver.batch import read_batch

PAGE = (ROOT / "docs/writing.md").read_text()


def test_examples(
    spark: SparkSession,
    shared_server: NatsServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = shared_server.url
    create_stream(url, "ORDERS", "orders.>")
    names: dict[str, Any] = {
        "spark": spark,
        "checkpoint": str(tmp_path / "checkpoint"),
        "lake": str(tmp_path / "lake"),
    }
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(example.replace("nats://127.0.0.1:4222", url), names)
    values = {row["key"]: bytes(row["value"]) for row in read_batch(url, bucket="fleet")}
    assert values == {"truck.1": b"48.1,11.5", "truck.2": b"48.2,11.6"}
    for copy in ("copy", "shouting", "rebuilt"):
        assert values == {
            row["key"]: bytes(row["value"]) for row in read_batch(url, bucket=copy)
        }, copy
    assert stream_state(url, "ORDERS")["messages"] == 10_001
    printed = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out == printed[-1]
