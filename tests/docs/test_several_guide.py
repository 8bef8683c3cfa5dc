"""The queries of docs/several.md run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from tests.docs.test_streams_guide import rows
from tests.support.nats.buckets import create_bucket, publish, put
from tests.support.nats.streams import create_stream
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/several.md").read_text()


def test_queries(spark: SparkSession, nats_server: NatsServer, tmp_path: Path) -> None:
    url = nats_server.url
    create_bucket(url, "site-1")
    put(url, "site-1", "k", b"v")
    for name in ("ORDERS", "RETURNS", "AUDIT"):
        create_stream(url, name)
        publish(url, [(f"{name}.x", b"", None)] * 18)
    names: dict[str, Any] = {"spark": spark}
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]:
        exec(example.replace("nats://127.0.0.1:4222", url), names)
    assert [row.bucket for row in rows(names["sites"], tmp_path / "sites")] == ["site-1"]
    found = [row.stream for row in rows(names["since"], tmp_path / "since")]
    assert {name: found.count(name) for name in ("ORDERS", "RETURNS", "AUDIT")} == {
        "ORDERS": 2,
        "RETURNS": 18,
        "AUDIT": 0,
    }
