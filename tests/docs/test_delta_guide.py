"""docs/delta.md: the history of a bucket, and the questions that the page asks of it."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from nats_stream_source.delta import follow
from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import create_bucket, put_many
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/delta.md").read_text()
NOON = datetime(2026, 11, 24, 12, tzinfo=timezone.utc)


def test_history_of_existing_bucket_has_each_key(
    spark: SparkSession, shared_server: NatsServer, tmp_path: Path
) -> None:
    create_bucket(shared_server.url, "fleet", 5)
    put_many(shared_server.url, "fleet", [(f"k{i}", b"old") for i in range(4)])
    put_many(shared_server.url, "fleet", [("k1", b"new")])
    reading, asking = re.findall(
        r"```python\n((?:revisions|from deltalake).*?)```",
        PAGE[PAGE.index("## History") :],
        re.DOTALL,
    )
    page = reading.replace("nats://127.0.0.1:4222", shared_server.url)
    page = page.replace("/lake/", f"{tmp_path}/").replace("=2)", "=2, once=True)")
    names: dict[str, Any] = {"spark": spark, "follow": follow}
    exec(page, names)
    assert names["query"].awaitTermination(120)

    # The page's Tuesday is today, its noon a minute after the puts.
    later = datetime.now(timezone.utc) + timedelta(minutes=1)
    for hour, time in ((12, later), (0, later - timedelta(hours=1))):
        asked = NOON.replace(hour=hour).strftime("%Y-%m-%dT%H:%M:%SZ")
        assert asked in asking
        asking = asking.replace(asked, time.strftime("%Y-%m-%dT%H:%M:%SZ"))
    asking = asking.replace("2026-11-25T00:00:00Z", later.strftime("%Y-%m-%dT%H:%M:%SZ"))
    exec(asking.replace("/lake/", f"{tmp_path}/"), names)
    fleet = {row["key"]: row["value"] for row in pa.table(names["fleet"]).to_pylist()}
    assert fleet == {"k0": "old", "k1": "new", "k2": "old", "k3": "old"}
    changed = [row["key"] for row in pa.table(names["changed"]).to_pylist()]
    assert sorted(changed) == ["k0", "k1", "k1", "k2", "k3"]
