"""The examples of docs/batch.md run as they stand."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nats_stream_source.embedded import NatsServer
from nats_stream_source.spark.runner import close_cached_runners
from tests.support.nats.buckets import create_bucket, delete, publish, put_many
from tests.support.nats.streams import create_stream
from tests.support.paths import ROOT
from tests.support.query_driver.batch import read_batch

GUIDE = (ROOT / "docs/batch.md").read_text()


def test_examples_run(
    spark: SparkSession, shared_server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = shared_server.url
    create_bucket(url, "fleet", 3)
    put_many(
        url,
        "fleet",
        [("plane.1", b"EWR"), ("plane.2", b"IAH"), ("ship.1", b"ROT"), ("plane.1", b"JFK")],
    )
    delete(url, "fleet", "plane.2")
    put_many(url, "fleet", [("ship.1", b"HAM")])
    create_stream(url, "ORDERS", "orders.>")
    publish(url, [(f"orders.{where}.1", b"", None) for where in ("eu", "us", "eu", "us")])
    moment = max(row["created"] for row in read_batch(url, bucket="fleet")).isoformat()
    close_cached_runners()
    names: dict[str, Any] = {"spark": spark, "servers": url, "moment": moment}
    examples = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    outputs = []
    for example in examples:
        exec(example, names)
        outputs.append(capsys.readouterr().out)
    now, _, then, changed, told, revisions, ranges = outputs
    assert re.findall(r"plane\.\d|ship\.\d", now) == ["plane.1"]
    assert re.findall(r"plane\.\d|ship\.\d", then) == ["plane.2", "ship.1", "plane.1"]
    rows = re.findall(r"([\w.]+)\| +(\w+)\| +(\d+)\|", changed)
    assert sorted(rows) == [("plane.2", "DEL", "5"), ("ship.1", "PUT", "6")]
    assert re.findall(r"plane\.\d|ship\.\d", told) == ["plane.1"]
    assert len(re.findall(r"\| +fleet\|", revisions)) == 5
    assert re.findall(r"orders\.\w+\.1", ranges) == ["orders.eu.1", "orders.eu.1", "orders.us.1"]
