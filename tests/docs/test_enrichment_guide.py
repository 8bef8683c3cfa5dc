"""The examples of docs/enrichment.md run, and print what the page shows."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/enrichment.md").read_text()


def test_examples(
    spark: SparkSession, shared_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    create_bucket(shared_server.url, "devices")
    put_many(shared_server.url, "devices", [("d1", b"oven1"), ("d2", b"oven2")])
    names: dict[str, Any] = {"spark": spark}
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(example.replace("nats://127.0.0.1:4222", shared_server.url), names)
    (printed,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert capsys.readouterr().out.strip() == printed.strip()
    values = [b"oven1", b"oven2", None, b"oven1", None]
    assert [row.value for row in names["fresh"].collect()] == values
    joined = {(row.celsius, row.value) for row in names["joined"].collect()}
    assert joined == set(zip((20.5, 19.0, 3.5, 21.0, 0.0), values, strict=True))
