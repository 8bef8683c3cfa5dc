"""The examples of the pages on Spark run as they stand, and print what the pages show."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from pyspark.sql import DataFrame, Row, SparkSession

from nats_stream_source.delta import follow, merge
from nats_stream_source.embedded import NatsServer
from nats_stream_source.spark.runner import close_cached_runners
from nats_stream_source.wire.codec import encode_key, parse_chain
from tests.docs.pages import SERVER, blocks, page, rows_now
from tests.support.nats.buckets import bucket_state, create_bucket, delete, publish, put, put_many
from tests.support.nats.streams import create_stream, stream_state
from tests.support.query_driver.batch import read_batch
from tests.support.spark.streaming_query import begin
from tests.support.wait import wait_until

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def url(nats_server: NatsServer) -> str:
    return nats_server.url


def run(examples: list[str], names: dict[str, Any]) -> dict[str, Any]:
    """Run the examples one after the other; the names that they define."""
    for example in examples:
        exec(example, names)
    return names


def values_of(url: str, bucket: str) -> dict[str, bytes]:
    return {row["key"]: bytes(row["value"]) for row in read_batch(url, bucket=bucket)}


def test_getting_started(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """With the server that the page starts, on a free port."""
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)  # restores what the page sets
    text = page("getting-started")
    (command,) = re.findall(r"^nats-server .*$", text, re.MULTILINE)
    first, store, directory, *others = shlex.split(command)[1:]
    assert (store, directory) == ("--store_dir", "nats-data")
    names: dict[str, Any] = {}
    compared = 0
    with NatsServer(store=tmp_path / directory, args=[first, *others]) as server:
        # Spark resolves the relative paths of the page in the directory of its JVM.
        text = text.replace(SERVER, server.url).replace('"lake/', f'"{tmp_path}/lake/')
        for language, block in re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL):
            if language == "python":
                exec(block, names)
            else:
                assert capsys.readouterr().out.strip() == block.strip()
                compared += 1
    assert compared == 4
    assert names["spark"] is spark


def test_batch(spark: SparkSession, url: str, capsys: Capture) -> None:
    create_bucket(url, "fleet", 3)
    planes = [("plane.1", b"EWR"), ("plane.2", b"IAH"), ("ship.1", b"ROT"), ("plane.1", b"JFK")]
    put_many(url, "fleet", planes)
    delete(url, "fleet", "plane.2")
    put_many(url, "fleet", [("ship.1", b"HAM")])
    create_stream(url, "ORDERS", "orders.>")
    publish(url, [(f"orders.{where}.1", b"", None) for where in ("eu", "us", "eu", "us")])
    moment = max(row["created"] for row in read_batch(url, bucket="fleet")).isoformat()
    close_cached_runners()
    names: dict[str, Any] = {"spark": spark, "servers": url, "moment": moment}
    outputs = []
    for example in blocks("batch", "python"):
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


def test_codecs(spark: SparkSession, url: str, capsys: Capture) -> None:
    run(blocks("codecs", "python", url=url), {"spark": spark})
    (printed,) = blocks("codecs", "text")
    assert capsys.readouterr().out.strip() == printed.strip()


def test_table_of_codecs() -> None:
    rows = re.findall(r"^\| `([\w,]+)` \| (`.*?) \| (`.*?) \|$", page("codecs"), re.MULTILINE)
    assert len(rows) == 3
    for chain, keys, stored in rows:
        codecs = parse_chain(chain, ("base64", "path"))
        encoded = [encode_key(codecs, key) for key in re.findall(r"`(.*?)`", keys)]
        assert encoded == re.findall(r"`(.*?)`", stored)


def test_enrichment(spark: SparkSession, url: str, capsys: Capture) -> None:
    create_bucket(url, "devices")
    put_many(url, "devices", [("d1", b"oven1"), ("d2", b"oven2")])
    names = run(blocks("enrichment", "python", url=url), {"spark": spark})
    (printed,) = blocks("enrichment", "text")
    assert capsys.readouterr().out.strip() == printed.strip()
    values = [b"oven1", b"oven2", None, b"oven1", None]
    assert [row.value for row in names["fresh"].collect()] == values
    joined = {(row.celsius, row.value) for row in names["joined"].collect()}
    assert joined == set(zip((20.5, 19.0, 3.5, 21.0, 0.0), values, strict=True))


def test_several(spark: SparkSession, url: str, tmp_path: Path) -> None:
    create_bucket(url, "site-1")
    put(url, "site-1", "k", b"v")
    for name in ("ORDERS", "RETURNS", "AUDIT"):
        create_stream(url, name)
        publish(url, [(f"{name}.x", b"", None)] * 18)
    names = run(blocks("several", "python", url=url)[:2], {"spark": spark})
    assert [row.bucket for row in rows_now(names["sites"], tmp_path / "sites")] == ["site-1"]
    found = [row.stream for row in rows_now(names["since"], tmp_path / "since")]
    counts = {name: found.count(name) for name in ("ORDERS", "RETURNS", "AUDIT")}
    assert counts == {"ORDERS": 2, "RETURNS": 18, "AUDIT": 0}


def test_streams(spark: SparkSession, url: str, tmp_path: Path) -> None:
    create_stream(url, "ORDERS", "orders.>")
    publish(url, [("orders.eu.1", b"one", {"Trace-Id": "x"}), ("orders.asia.1", b"two", None)])
    publish(url, [("orders.us.1", b"three", None)])
    create_bucket(url, "fleet")
    transform = {"src": "$KV.fleet.>", "dest": "$KV.all-sites.fleet.>"}
    sources = [{"name": "KV_fleet", "subject_transforms": [transform]}]
    create_bucket(url, "all-sites", sources=sources)
    put(url, "fleet", "v1", b"")
    wait_until(lambda: bucket_state(url, "all-sites")["messages"] == 1, "the sourced entry")
    first, traced, everywhere, looked_up, replayed = blocks("streams", "python", url=url)
    names: dict[str, Any] = {"spark": spark}

    def rows_of(example: str, name: str) -> list[Row]:
        run([example], names)
        return rows_now(names[name], tmp_path / f"{len(list(tmp_path.iterdir()))}")

    run([first], names)
    assert rows_of(traced, "traced") == [Row(sequence=1, trace="x"), Row(sequence=3, trace=None)]
    (entry,) = rows_of(everywhere, "everywhere")
    assert (entry.key, entry.origin_stream, entry.origin_sequence) == ("fleet.v1", "KV_fleet", 1)
    assert [row.sequence for row in rows_of(looked_up, "orders")] == [1, 2, 3]
    assert [bytes(row.data) for row in rows_of(replayed, "replayed")] == [b"three"]


def test_writing(spark: SparkSession, url: str, tmp_path: Path, capsys: Capture) -> None:
    create_stream(url, "ORDERS", "orders.>")
    paths = {"checkpoint": str(tmp_path / "checkpoint"), "lake": str(tmp_path / "lake")}
    run(blocks("writing", "python", url=url), {"spark": spark, **paths})
    values = values_of(url, "fleet")
    assert values == {"truck.1": b"48.1,11.5", "truck.2": b"48.2,11.6"}
    for copy in ("copy", "shouting", "rebuilt"):
        assert values_of(url, copy) == values, copy
    assert stream_state(url, "ORDERS")["messages"] == 10_001
    assert capsys.readouterr().out == blocks("writing", "text")[-1]


def test_history_of_existing_bucket_has_each_key(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    """docs/delta.md: the history of a bucket, and the questions that the page asks of it."""
    create_bucket(url, "fleet", 5)
    put_many(url, "fleet", [(f"k{i}", b"old") for i in range(4)])
    put_many(url, "fleet", [("k1", b"new")])
    reading, asking = (
        block
        for block in blocks("delta", "python", url=url, lake=str(tmp_path))
        if block.startswith(("revisions", "from deltalake"))
    )
    names: dict[str, Any] = {"spark": spark, "follow": follow}
    run([reading.replace("=2)", "=2, once=True)")], names)
    assert names["query"].awaitTermination(120)

    # The page's Tuesday is today, its noon a minute after the puts.
    later = datetime.now(timezone.utc) + timedelta(minutes=1)
    for asked, moment in (
        ("2026-11-24T12:00:00Z", later),
        ("2026-11-24T00:00:00Z", later - timedelta(hours=1)),
        ("2026-11-25T00:00:00Z", later),
    ):
        assert asked in asking
        asking = asking.replace(asked, moment.strftime("%Y-%m-%dT%H:%M:%SZ"))
    run([asking], names)
    fleet = {row["key"]: row["value"] for row in pa.table(names["fleet"]).to_pylist()}
    assert fleet == {"k0": "old", "k1": "new", "k2": "old", "k3": "old"}
    changed = [row["key"] for row in pa.table(names["changed"]).to_pylist()]
    assert sorted(changed) == ["k0", "k1", "k1", "k2", "k3"]


# What `protoc --python_out` makes of a message with two fields, without protoc.
ORDER_PB2 = """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Field = descriptor_pb2.FieldDescriptorProto
fields = [
    Field(name="id", number=1, type=Field.TYPE_INT64, label=Field.LABEL_OPTIONAL),
    Field(name="city", number=2, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL),
]
message = descriptor_pb2.DescriptorProto(name="Order", field=fields)
pool = descriptor_pool.DescriptorPool()
pool.Add(
    descriptor_pb2.FileDescriptorProto(
        name="order.proto", package="shop", syntax="proto3", message_type=[message]
    )
)
Order = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
"""


@pytest.mark.delta
def test_values(
    spark: SparkSession, url: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_stream(url, "HITS", "hits.>", allow_msg_counter=True)
    additions = [("hits.a", "+1"), ("hits.b", "+2"), ("hits.a", "+5"), ("hits.b", "-3")]
    publish(url, [(subject, b"", {"Nats-Incr": added}) for subject, added in additions])
    (tmp_path / "order_pb2.py").write_text(ORDER_PB2)
    spark.sparkContext.addPyFile(str(tmp_path / "order_pb2.py"))
    monkeypatch.syspath_prepend(str(tmp_path))

    names: dict[str, Any] = {"spark": spark, "lake": str(tmp_path), "__name__": "__main__"}
    examples = re.findall(
        r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", page("values"), re.DOTALL
    )
    printed = []
    for example, _ in examples:
        exec(example.replace(SERVER, url), names)
        printed.append(capsys.readouterr().out.strip())
    sys.modules.pop("order_pb2", None)
    assert printed == [expected.strip() for _, expected in examples]

    # The micro-batch is repeated.
    names["keep"](names["json"].withColumn("bad", names["bad"]), 0)
    assert stream_state(url, "BAD")["messages"] == 3
    assert spark.read.format("delta").load(f"{tmp_path}/bad_cars").count() == 3
    good = spark.read.format("delta").load(f"{tmp_path}/cars").select("key", "plate", "km")
    expected = [("json.1", "M-1", 1200), ("json.4", None, 9), ("json.6", "M-6", 5)]
    assert sorted(map(tuple, good.collect())) == expected


# -- table.md: what a new table has, its readers, and the way out to its end ---------------------

FEATURES = {"deletionVectors", "appendOnly", "invariants"}
RULE = "nats_stream_source.cdc"


def table_of(spark: SparkSession, path: Path, **arguments: Any) -> DeltaTable:
    """A table of keys k0 to k9, of which k1 was updated and k2 deleted by a second batch."""
    columns = "key STRING, value BINARY, revision BIGINT, deleted BOOLEAN"
    given = {
        "keys": ["key"],
        "sequence_by": "revision",
        "apply_as_deletes": "deleted",
        "except_column_list": ["deleted"],
        **arguments,
    }
    first = [(f"k{i}", b"old", i + 1, False) for i in range(10)]
    for rows in (first, [("k1", b"new", 20, False), ("k2", None, 21, True)]):
        merge(spark.createDataFrame(rows, columns), str(path), **given)
    return DeltaTable(path)


@pytest.mark.delta
def test_new_table_has_features_and_properties_of_page(spark: SparkSession, tmp_path: Path) -> None:
    protocol = table_of(spark, tmp_path / "fleet").protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (3, 7)
    assert {*protocol.reader_features, *protocol.writer_features} == FEATURES
    properties = DeltaTable(tmp_path / "fleet").metadata().configuration
    assert properties.keys() == {
        "delta.enableDeletionVectors",
        "delta.deletedFileRetentionDuration",
        "delta.logRetentionDuration",
        "delta.checkpointInterval",
        RULE,
    }
    assert all(
        f"`{name}`" in page("table") for name in {*FEATURES, "delta.checkpointInterval", RULE}
    )
    plain = table_of(spark, tmp_path / "plain", deletion_vectors=False).protocol()
    assert (plain.min_reader_version, plain.min_writer_version) == (1, 2)


@pytest.mark.delta
def test_readers_of_page_return_rows(spark: SparkSession, tmp_path: Path) -> None:
    table_of(spark, tmp_path / "fleet")
    names: dict[str, Any] = {"spark": spark}
    exec(blocks("table", "python", lake=str(tmp_path))[0], names)
    expected = {f"k{i}" for i in range(10) if i != 2}
    assert {row["key"] for row in pa.table(names["by_deltalake"]).to_pylist()} == expected
    assert set(names["by_polars"]["key"]) == expected
    assert {row[0] for row in names["by_duckdb"]} == expected
    assert {row.key for row in names["by_spark"].collect()} == expected


@pytest.mark.delta
def test_way_out_leads_to_plain_table(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "fleet"
    table_of(spark, path, stored_as_scd_type=1)

    way_out, merging = blocks("table", "sql", lake=str(tmp_path))

    def run_sql(statements: str) -> None:
        for statement in statements.split(";"):
            if statement.strip():
                spark.sql(statement)

    assert DeltaTable(path).protocol().reader_features == ["deletionVectors"]
    run_sql(way_out)
    shutil.rmtree(tmp_path / "fleet__cdc_state")
    table = DeltaTable(path)
    assert table.protocol().reader_features is None
    assert RULE not in table.metadata().configuration
    assert len(table_values(path)) == 9
    changes = [("k1", None, 30), ("k3", b"newer", 31), ("k11", b"first", 32)]
    columns = "key STRING, value BINARY, revision BIGINT"
    spark.createDataFrame(changes, columns).createOrReplaceTempView("changes")
    run_sql(merging)
    values = dict(table_values(path))
    assert values.keys() == {"k0", "k3", "k11", *(f"k{i}" for i in range(4, 10))}
    assert (values["k3"], values["k11"]) == (b"newer", b"first")
    with pytest.raises(DeltaError, match="checkpointProtection"):
        write_deltalake(path, table.to_pyarrow_table(), mode="append")


def table_values(path: Path) -> list[tuple[str, bytes]]:
    """Keys and values by the reader that refuses deletion vectors."""
    rows = DeltaTable(path).to_pandas()
    return list(zip(rows["key"], rows["value"], strict=True))


DEADLINE = 300.0  # seconds, for two queries that start on a busy machine
STORE = "spark.sql.streaming.stateStore.providerClass"
SHORTER = {'"1 minute"': '"1 second"', '"10 seconds"': '"0 seconds"', "600_000": "1_000"}


@pytest.fixture
def examples(spark: SparkSession, shared_server: NatsServer) -> Iterator[dict[str, Any]]:
    """The names that the page defines, with windows and timers of a second."""
    url = shared_server.url
    create_bucket(url, "fleet", 10)
    for name in ("ORDERS", "PAYMENTS"):
        create_stream(url, name, f"{name.lower()}.>")
    code = "\n".join(blocks("stateful", "python", url=url))
    for long, short in SHORTER.items():
        assert long in code
        code = code.replace(long, short)
    before = spark.conf.get(STORE)
    names: dict[str, Any] = {"spark": spark, "__name__": "__main__", "url": url}
    exec(code, names)
    yield names
    assert before is not None
    spark.conf.set(STORE, before)


def test_windows_joins_and_deduplication(examples: dict[str, Any], tmp_path: Path) -> None:
    url = examples["url"]
    put_many(url, "fleet", [("window.1", b""), ("window.2", b"")])
    second = int(time.time())
    wait_until(lambda: time.time() >= second + 1, "a window later")
    put_many(url, "fleet", [("window.3", b"")])
    windows = rows_now(examples["changes"], tmp_path / "windows")
    assert sum(row.changes for row in windows) == 2, "the last window is still open"

    orders = ["orders.eu.large.1", "orders.eu.small.2", "orders.us.large.3", "orders.us.small.4"]
    publish(url, [(subject, b"", None) for subject in orders])
    publish(url, [(f"payments.{number}", b"", None) for number in (3, 1, 9)])
    settled = rows_now(examples["settled"], tmp_path / "settled")
    assert sorted(row.id for row in settled) == ["1", "3"]
    assert all(row.placed <= row.paid for row in settled)
    watched = rows_now(examples["watched"], tmp_path / "watched")
    assert sorted(row.subject for row in watched) == orders[:3]


def test_transform_with_state(examples: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf", reason="the extra `dev` installs it")
    url = examples["url"]
    found: dict[str, list[Row]] = {"busy": [], "silent": []}
    batches: list[int] = []

    def collect(rows: list[Row]) -> Callable[[DataFrame, int], None]:
        def function(batch: DataFrame, number: int) -> None:
            rows.extend(batch.collect())
            batches.append(number)

        return function

    put_many(url, "fleet", [(f"{key}.truck", b"") for key in ("parked", "sold", "driven")])
    delete(url, "fleet", "sold.truck")
    queries = [
        begin(
            examples[name]
            .where("key LIKE '%.truck'")
            .writeStream.foreachBatch(collect(rows))
            .option("checkpointLocation", str(tmp_path / name))
            .start
        )
        for name, rows in found.items()
    ]

    def alive() -> None:
        for query in queries:
            if (error := query.exception()) is not None:
                raise error

    def silent_keys() -> list[str]:
        return sorted(row.key for row in found["silent"])

    try:
        wait_until(
            lambda: len(silent_keys()) == 2 and batches.count(0) == 2,
            "two silent keys",
            DEADLINE,
            alive=alive,
        )
        assert silent_keys() == ["driven.truck", "parked.truck"]
        revisions = put_many(url, "fleet", [("driven.truck", b"")] * 5)
        wait_until(
            lambda: len(silent_keys()) > 2 and len(found["busy"]) > 1,
            "driven again",
            DEADLINE,
            alive=alive,
        )
    finally:
        for query in queries:
            query.stop()
    assert [row.revision for row in found["busy"]] == revisions[3:]
    last = {row.key: row.last for row in found["silent"]}
    assert last["driven.truck"] > last["parked.truck"]
