"""The demo's readers of a bucket and of the files of a Parquet sink."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nats.aio.client import Client

from nats_stream_source.demo import flights, tables
from nats_stream_source.demo.compare import State
from nats_stream_source.demo.writer import create_bucket
from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import with_client


def test_read_bucket(server: NatsServer) -> None:
    async def fill(client: Client) -> None:
        bucket = await client.jetstream().key_value("read")
        await bucket.put("a", b'{"flight":1}')
        await bucket.put("a", b'{"flight":2}')
        await bucket.put("b", b'{"flight":3}')
        await bucket.delete("b")
        await bucket.put("c", b'{"flight":4}')
        await bucket.purge("c")

    asyncio.run(create_bucket(server.url, "read", history=5))
    with_client(server.url, fill)
    assert asyncio.run(tables.read_bucket(server.url, "read")) == {
        "a": State(2, {"flight": 2}),
        "b": State(4, None),
        "c": State(6, None),
    }


def parquet(path: Path, name: str, rows: list[tuple[str, int, str]]) -> str:
    """Write a file as the Parquet sink does; return its line in the sink's list of files."""
    columns: dict[str, Any] = {field: [None] * len(rows) for field in flights.VALUE_FIELDS}
    keys, revisions, operations = zip(*rows, strict=True)
    columns.update(key=list(keys), revision=list(revisions), operation=list(operations))
    columns["scheduled"] = pa.array([1_357_035_300] * len(rows), pa.timestamp("s", "UTC"))
    columns["flight"] = list(revisions)
    path.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path / name)
    return json.dumps({"path": f"file://{quote(str(path / name))}", "action": "add"})


def listed(path: Path, batch: str, lines: list[str]) -> None:
    """Write the file of micro-batch ``batch`` in the sink's list of files."""
    (path / "_spark_metadata").mkdir(exist_ok=True)
    (path / "_spark_metadata" / batch).write_text("\n".join(["v1", *lines]))


def test_read_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a table"
    first = parquet(path, "1.parquet", [("a", 3, "PUT"), ("b", 2, "PUT"), ("a", 1, "PUT")])
    second = parquet(path, "2.parquet", [("b", 4, "DEL")])
    parquet(path, "of a batch that was cut.parquet", [("b", 4, "DEL"), ("a", 5, "PUT")])
    listed(path, "0", [first])
    listed(path, "1.compact", [first, second])
    assert tables.read_parquet(path) == {
        "a": State(3, {"flight": 3, "scheduled": "2013-01-01T10:15:00Z"}),
        "b": State(4, None),
    }


def test_read_parquet_refuses_duplicate_row(tmp_path: Path) -> None:
    listed(tmp_path, "0", [parquet(tmp_path, "1.parquet", [("a", 1, "PUT")])])
    listed(tmp_path, "1", [parquet(tmp_path, "2.parquet", [("a", 1, "PUT"), ("a", 2, "PUT")])])
    with pytest.raises(ValueError, match=r"could not read .*: 1 revisions occur more than once"):
        tables.read_parquet(tmp_path)
