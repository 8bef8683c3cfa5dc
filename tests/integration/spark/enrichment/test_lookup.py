"""Entries of a bucket for rows: as a task adds them, and ``lookup`` in Spark."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.functions import expr

from nats_stream_source import lookup
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    ConfigurationError,
    ConnectError,
    MinLastSequenceError,
    PermissionDeniedError,
    UndecodableError,
)
from nats_stream_source.options.reading import lookup_options
from nats_stream_source.spark.enrichment import entries
from nats_stream_source.spark.enrichment.entries import Lookup, with_entries
from nats_stream_source.spark.runner import close_cached_runners
from nats_stream_source.wire.codec import encode_key, encode_value
from tests.support.nats.buckets import create_bucket, delete, fill_bucket, purge, put, put_many
from tests.support.nats.topology import configured_server, with_user
from tests.support.spark.streaming_query import run_to_the_end

pytestmark = pytest.mark.servers

Rows = list[tuple[Any, ...]]
ALL = {"value": "value", "revision": "revision", "created": "created"}


def task(url: str, bucket: str, columns: dict[str, str] | None = None, **options: str) -> Lookup:
    given = {"servers": url, **options}
    return Lookup(lookup_options(bucket, given), 1, columns or {"value": "value"})


def batch(*keys: str | None) -> pa.RecordBatch:
    numbers = pa.array(range(len(keys)), pa.int32())
    return pa.record_batch({"n": numbers, "key": pa.array(keys, pa.string())})


def rows(*batches: pa.RecordBatch, lookup: Lookup) -> Rows:
    """The rows with their entries, without the keys; each is in its place."""
    found: Rows = []
    for one in with_entries(iter(batches), lookup):
        one.validate(full=True)
        found += [tuple(row.values()) for row in one.drop_columns("key").to_pylist()]
    numbers = [n for one in batches for n in one["n"].to_pylist()]
    assert [row[0] for row in found] == numbers
    return [row[1:] for row in found]


def test_rows_keep_their_order_and_have_their_entries(url: str) -> None:
    create_bucket(url, "b", history=3)
    put_many(url, "b", [("x", b"old"), ("x", b"1"), ("y.z", b""), ("gone", b"2"), ("went", b"2")])
    delete(url, "b", "gone")
    purge(url, "b", "went")
    given = batch("y.z", None, "x", "gone", "missing", "x", "went", "x")
    found = rows(given, lookup=task(url, "b", ALL))
    shown = [row[:2] for row in found]
    nothing = (None, None)
    assert shown == [(b"", 3), nothing, (b"1", 2), nothing, nothing, (b"1", 2), nothing, (b"1", 2)]
    assert all(isinstance(row[2], datetime) == (row[1] is not None) for row in found)
    (one,) = with_entries(iter([given]), task(url, "b", {"when": "created", "value": "value"}))
    assert one.schema.names == ["n", "key", "when", "value"]
    assert one.schema.types[2:] == [pa.timestamp("us", "UTC"), pa.binary()]


def test_keys_that_bucket_cannot_have(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are not sent: a wildcard would match other keys."""
    fill_bucket(url, "bad", [("x", b"1"), ("a.b", b"2")])
    bad = [">", "*", "a.*", "", ".", "a..b", "a.b.", "a b", "ä", 'x","a.b', "x\n", "k" * 5000]
    found = rows(batch(*bad, "x"), batch(">", "a.b"), lookup=task(url, "bad"))
    assert found == [(None,)] * len(bad) + [(b"1",), (None,), (b"2",)]
    line = f"keys that the bucket cannot have are without an entry bucket=bad count={len(bad) + 1}"
    assert caplog.text.count(line) == 1


@pytest.mark.parametrize("chain", ["base64", "path", "path,base64"])
def test_codecs(url: str, chain: str) -> None:
    bucket = f"c{chain.replace(',', '')}"
    create_bucket(url, bucket)
    codecs = tuple(chain.split(","))
    keys = ["plain", "a/b c" if "base64" in chain else "a/b", "/root"]
    for key in keys:
        put(url, bucket, encode_key(codecs, key), encode_value(("base64",), key.encode()))
    delete(url, bucket, encode_key(codecs, "plain"))
    options = {"keyCodec": chain, "valueCodec": "base64"}
    found = rows(batch(*keys, "none"), lookup=task(url, bucket, **options))
    assert found == [(None,), (keys[1].encode(),), (b"/root",), (None,)]


def test_key_that_is_stored_as_another_key(url: str) -> None:
    """``path`` stores ``a/b/`` and ``a.b`` as ``a.b``, which is the key ``a/b``."""
    fill_bucket(url, "paths", [("a.b", b"v")])
    lookup = task(url, "paths", keyCodec="path")
    assert rows(batch("a/b", "a/b/", "a.b"), lookup=lookup) == [(b"v",), (None,), (None,)]


def test_undecodable_value(url: str) -> None:
    fill_bucket(url, "und", [("good", b"YQ"), ("bad", b"?")])
    with pytest.raises(UndecodableError, match=r"'bad' of bucket 'und', revision 2.*'valueCodec'"):
        rows(batch("good", "bad"), lookup=task(url, "und", valueCodec="base64"))
    options = {"valueCodec": "base64", "onUndecodable": "null"}
    found = rows(batch("good", "bad"), lookup=task(url, "und", ALL, **options))
    assert [row[:2] for row in found] == [(b"a", 1), (None, 2)]


def test_large_values_are_requested_and_yielded_in_pieces(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_MAX_BYTES", 10_000)
    fill_bucket(url, "large", ((f"k{i}", b"%d" % i * 1000) for i in range(10, 60)))
    put(url, "large", "huge", b"x" * 50_000)
    keys = [f"k{10 + i % 50}" for i in range(200)] + ["huge", "huge", "k10"]
    pieces = list(with_entries(iter([batch(*keys)]), task(url, "large")))
    assert [key for one in pieces for key in one["key"].to_pylist()] == keys
    for one in pieces:
        values = one["value"].to_pylist()
        assert len(values) == 1 or sum(map(len, values)) <= 10_000
        for key, value in zip(one["key"].to_pylist(), values, strict=True):
            assert value == (b"x" * 50_000 if key == "huge" else key[1:].encode() * 1000)


def test_batches_without_rows_or_keys(url: str) -> None:
    create_bucket(url, "void")
    assert rows(batch(), batch(None, None), batch("x"), lookup=task(url, "void")) == [(None,)] * 3
    assert rows(lookup=task(url, "void")) == []


def test_entries_of_each_batch_are_current(url: str) -> None:
    create_bucket(url, "moves")

    def batches() -> Iterator[pa.RecordBatch]:
        for i in range(3):
            put(url, "moves", "k", b"%d" % i)
            yield batch("k")

    found = [one["value"].to_pylist() for one in with_entries(batches(), task(url, "moves"))]
    assert found == [[b"0"], [b"1"], [b"2"]]


def test_min_last_revision_is_awaited(url: str) -> None:
    fill_bucket(url, "raw", [("k", b"1")])
    options = {"minLastRevision": "2", "requestTimeout": "0.3"}
    with pytest.raises(MinLastSequenceError, match="KV_raw has reached 1, not 2"):
        rows(batch("k"), lookup=task(url, "raw", **options))
    writer = threading.Timer(0.3, lambda: put(url, "raw", "k", b"2"))
    writer.start()
    options["requestTimeout"] = "30"
    assert rows(batch("k"), lookup=task(url, "raw", **options)) == [(b"2",)]
    writer.join()


def test_permissions() -> None:
    """Without the permission for Direct Get, the leader is requested for each key."""
    api_subjects = [f"$JS.API.{name}.KV_fleet" for name in ("STREAM.INFO", "STREAM.MSG.GET")]
    many = "$JS.API.DIRECT.GET.KV_fleet"
    users = {"some": api_subjects, "more": [*api_subjects, many], "few": [many]}
    lines = [
        f"{{user: {user}, password: p, permissions: "
        f"{{publish: {json.dumps(subjects)}, subscribe: ['_INBOX.>']}}}}"
        for user, subjects in users.items()
    ]
    config = "jetstream: enabled\nauthorization { users: [\n{user: all, password: p}\n"
    with configured_server(config + "\n".join(lines) + "\n] }\n") as server:
        url = with_user(server.url, "all", "p")
        fill_bucket(url, "fleet", [("a", b"1"), ("b", b"2")])
        for user in ("some", "more"):
            lookup = task(server.url, "fleet", user=user, password="p")
            assert rows(batch("a", "c", "b"), lookup=lookup) == [(b"1",), (None,), (b"2",)]
        with pytest.raises(PermissionDeniedError, match=r"STREAM\.INFO\.KV_fleet"):
            rows(batch("a"), lookup=task(server.url, "fleet", user="few", password="p"))
        close_cached_runners()


def test_server_restarts_between_batches(nats_server: NatsServer) -> None:
    """The connection is replaced; a server that is away at the start is an error."""
    url = nats_server.url
    fill_bucket(url, "stays", [("k", b"v")])

    def batches() -> Iterator[pa.RecordBatch]:
        yield batch("k")
        nats_server.kill()
        starter.start()
        yield batch("k", "x")

    starter = threading.Timer(1.0, nats_server.start)
    lookup = task(url, "stays", connectTimeout="0.5")
    found = [one["value"].to_pylist() for one in with_entries(batches(), lookup)]
    starter.join()
    assert found == [[b"v"], [b"v", None]]
    close_cached_runners()
    nats_server.kill()
    with pytest.raises(ConnectError, match="'connectTimeout'"):
        rows(batch("k"), lookup=lookup)


def test_random_rows_equal_bucket(url: str) -> None:
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    create_bucket(url, "any", history=2)
    state: dict[str, tuple[bytes, int]] = {}
    for _ in range(400):
        key = f"k.{draw.randrange(150)}"
        if draw.random() < 0.25:
            (delete if draw.random() < 0.5 else purge)(url, "any", key)
            state.pop(key, None)
        else:
            value = draw.randbytes(draw.randrange(40))
            state[key] = value, put(url, "any", key, value)
    names = [None, *(f"k.{i}" for i in range(200))]
    keys = [draw.choice(names) for _ in range(3000)]
    parts = [keys[i : i + 700] for i in range(0, 3000, 700)]
    lookup = task(url, "any", {"value": "value", "revision": "revision"})
    found = [
        row
        for one in with_entries((batch(*part) for part in parts), lookup)
        for row in zip(one["value"].to_pylist(), one["revision"].to_pylist(), strict=True)
    ]
    assert found == [state.get(key or "", (None, None)) for key in keys], seed


@pytest.fixture
def devices(url: str, request: pytest.FixtureRequest) -> str:
    """A bucket of the test's own: ``d0`` to ``d9``, of which ``d3`` is deleted."""
    name = request.node.name.partition("[")[0]
    fill_bucket(url, name, ((f"d{i}", b"v%d" % i) for i in range(10)))
    delete(url, name, "d3")
    return name


def test_batch_of_all_kinds_of_columns(spark: SparkSession, url: str, devices: str) -> None:
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
    found = lookup(rows, bucket=devices, key="device_id", columns=added, servers=url)
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
    spark: SparkSession, url: str, devices: str, tmp_path: Path
) -> None:
    source, found = tmp_path / "events", list[Row]()
    source.mkdir()
    events = spark.readStream.schema("device_id STRING").json(str(source))
    enriched = lookup(events, bucket=devices, key="DEVICE_ID", servers=url)

    def run() -> list[Row]:
        found.clear()
        writes = enriched.writeStream.foreachBatch(lambda df, _: found.extend(df.collect()))
        options = {"checkpointLocation": str(tmp_path / "checkpoint")}
        run_to_the_end(writes.options(**options).trigger(availableNow=True).start)
        return sorted(found)

    (source / "1.json").write_text('{"device_id": "d1"}\n{"device_id": "d3"}\n')
    assert run() == [Row(device_id="d1", value=b"v1"), Row(device_id="d3", value=None)]
    put(url, devices, "d3", b"back")
    (source / "2.json").write_text('{"device_id": "d3"}\n')
    assert run() == [Row(device_id="d3", value=b"back")]


def test_missing_bucket_is_named_in_failure_of_task(spark: SparkSession, url: str) -> None:
    rows = lookup(_rows(spark).drop("value"), bucket="absent", key="k", servers=url)
    with pytest.raises(PySparkException, match="BucketNotFoundError: bucket 'absent' does not exi"):
        rows.collect()


def _rows(spark: SparkSession) -> DataFrame:
    return spark.range(1).select(expr("'d1' AS k"), "id", expr("'x' AS value"), expr("1 AS Id2"))


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
