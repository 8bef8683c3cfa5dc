"""``lookup`` in Spark: batches, queries, arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.functions import expr

from nats_stream_source import lookup
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import ConfigurationError
from tests.support.nats.buckets import create_bucket, delete, put, put_many
from tests.support.spark.streaming_query import run_to_the_end


@pytest.fixture
def devices(shared_server: NatsServer, request: pytest.FixtureRequest) -> str:
    """A bucket of the test's own: ``d0`` to ``d9``, of which ``d3`` is deleted."""
    name = request.node.name.partition("[")[0]
    create_bucket(shared_server.url, name)
    put_many(shared_server.url, name, ((f"d{i}", b"v%d" % i) for i in range(10)))
    delete(shared_server.url, name, "d3")
    return name


def test_batch_of_all_kinds_of_columns(
    spark: SparkSession, shared_server: NatsServer, devices: str
) -> None:
    """Rows of two tasks; columns that are not looked up stay as they are."""
    columns = (
        "id",
        "struct(id, array(id, null)) AS nested",
        "map('a', id) AS mapped",
        "CAST(1.5 AS DECIMAL(9, 2)) AS exact",
        "TIMESTAMP '2026-11-21 08:00:00' AS moment",
        "parse_json('{\"a\": 1}') AS tree",
        "CAST(null AS STRING) AS nothing",
        "CASE WHEN id % 4 = 3 THEN null ELSE concat('d', id % 12) END AS device_id",
    )
    rows = spark.range(0, 40, 1, 2).selectExpr(*columns)
    added = {"value": "device", "revision": "device_revision"}
    found = lookup(rows, bucket=devices, key="device_id", columns=added, servers=shared_server.url)
    assert found.schema.names == [*rows.schema.names, "device", "device_revision"]
    assert found.schema.fields[: len(columns)] == rows.schema.fields
    expected = {row.id: row for row in rows.collect()}
    shown = found.collect()
    assert [row.id for row in shown] == list(range(40))
    for row in shown:
        # A value of VARIANT does not compare equal to another one.
        assert repr(row[: len(columns)]) == repr(tuple(expected[row.id]))
        key = row.device_id
        exists = key is not None and int(key[1:]) < 10
        assert row.device == (b"v" + key[1:].encode() if exists else None)
        assert row.device_revision == (int(key[1:]) + 1 if exists else None)


def test_query_has_entries_of_each_micro_batch(
    spark: SparkSession, shared_server: NatsServer, devices: str, tmp_path: Path
) -> None:
    source, found = tmp_path / "events", list[Row]()
    source.mkdir()
    events = spark.readStream.schema("device_id STRING").json(str(source))
    enriched = lookup(events, bucket=devices, key="DEVICE_ID", servers=shared_server.url)

    def run() -> list[Row]:
        found.clear()
        writes = enriched.writeStream.foreachBatch(lambda df, _: found.extend(df.collect()))
        options = {"checkpointLocation": str(tmp_path / "checkpoint")}
        run_to_the_end(writes.options(**options).trigger(availableNow=True).start)
        return sorted(found)

    (source / "1.json").write_text('{"device_id": "d1"}\n{"device_id": "d3"}\n')
    assert run() == [Row(device_id="d1", value=b"v1"), Row(device_id="d3", value=None)]
    put(shared_server.url, devices, "d3", b"back")
    (source / "2.json").write_text('{"device_id": "d3"}\n')
    assert run() == [Row(device_id="d3", value=b"back")]


def test_missing_bucket_is_named_in_failure_of_task(
    spark: SparkSession, shared_server: NatsServer
) -> None:
    rows = lookup(_rows(spark).drop("value"), bucket="absent", key="k", servers=shared_server.url)
    with pytest.raises(PySparkException, match="BucketNotFoundError: bucket 'absent' does not exi"):
        rows.collect()


def _rows(spark: SparkSession) -> DataFrame:
    return spark.range(1).select(expr("'d1' AS k"), "id", expr("'x' AS value"), expr("1 AS Id2"))


Columns = Sequence[str] | Mapping[str, str]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing key": ({"key": "device"}, "column 'device' is missing, the columns are k, id, value"),
    "an expression": ({"key": "upper(k)"}, r"column 'upper\(k\)' is missing.*not an expression"),
    "key of another type": ({"key": "id"}, "column 'id' is BIGINT, expected STRING; cast it"),
    "unknown column": (
        {"columns": ["valu"]},
        r"columns is \['valu'\], expected some of value, rev",
    ),
    "no column": ({"columns": []}, r"columns is \[\], expected some of value"),
    "repeated column": ({"columns": ["revision", "revision"]}, "expected each name once"),
    "present column": ({"columns": "value"}, "has a column 'value'; give .* columns={'value': …}"),
    "present name": ({"columns": {"value": "ID"}}, "the DataFrame has a column 'ID'"),
    "one name twice": (
        {"columns": {"value": "new", "revision": "New"}},
        "the DataFrame has a column 'New'",
    ),
    "bucket": ({"bucket": "a.b"}, "'a.b' is not a bucket name"),
    "missing servers": ({"servers": None}, "option 'servers' is missing"),
    "unknown option": (
        {"keycodek": "base64"},
        "unknown option 'keycodek'; did you mean",
    ),
    "option of a read": ({"includeHistory": True}, "unknown option 'includeHistory'"),
    "skip": ({"valueCodec": "base64", "onUndecodable": "skip"}, "is not one of fail, null"),
    "no effect": ({"onUndecodable": "null"}, "has no effect without 'valueCodec'"),
    "secret": ({"password": "s3cret"}, "(?!.*s3cret)"),
}


@pytest.mark.parametrize(("given", "problem"), BAD.values(), ids=BAD)
def test_arguments_refused(spark: SparkSession, given: dict[str, Any], problem: str) -> None:
    arguments = {
        "bucket": "b",
        "key": "k",
        "columns": {"value": "found"},
        "servers": "nats://127.0.0.1:1",
        **given,
    }
    arguments = {name: value for name, value in arguments.items() if value is not None}
    with pytest.raises(ConfigurationError, match=f"^{problem}|.*{problem}"):
        lookup(_rows(spark), **arguments)
