"""Targets of a sink: created with limits, acknowledging early; columns and codecs of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from nats_stream_source.errors import ApiError, ConfigurationError, OptionError
from nats_stream_source.options.writing import kv_write_options, stream_write_options
from nats_stream_source.rows.columns import ddl as columns_read
from nats_stream_source.spark.datasource import validate_columns
from nats_stream_source.spark.writing.task import prepare_target
from tests.support.nats.buckets import api
from tests.support.nats.cluster import Cluster
from tests.support.nats.jwt_operator import Operator
from tests.support.nats.streams import create_stream
from tests.support.nats.topology import configured_server
from tests.support.query_driver.batch import read_batch
from tests.support.spark.streaming_query import run_to_the_end

CONFIG = """
server_tags: ["ssd"]
jetstream { limits: {duplicate_window: "2m"} }
accounts {
  A {
    jetstream { max_bytes_required: true, max_file: 10M, disk_max_stream_bytes: 4M }
    users: [{user: a, password: a}]
  }
  NO_MEMORY { jetstream { max_mem: 0 }, users: [{user: no_memory, password: a}] }
  NO_FILES { jetstream { max_file: 0 }, users: [{user: no_files, password: a}] }
  FULL { jetstream { max_streams: 1 }, users: [{user: full, password: a}] }
}
no_auth_user: a
"""

CREATED = {
    "maxBytes": "2m",
    "compression": "s2",
    "placementTags": "ssd",
    "metadata": '{"owner": "fleet", "cost centre": "7"}',
}

REFUSED: dict[int, tuple[dict[str, str], str, dict[str, str]]] = {
    10074: (
        {"user": "no_memory", "replicas": "3"},
        r"set the option 'replicas' to 1, or use a cluster",
        {"replicas": "1"},
    ),
    10028: ({"user": "no_memory", "storage": "memory"}, r"storage=file$", {"storage": "file"}),
    10047: ({"user": "no_files"}, r"storage=memory$", {"storage": "memory"}),
    10052: (
        {"user": "no_files", "storage": "memory", "duplicateWindow": "121"},
        r"duplicates window .*; change the option of the property",
        {"duplicateWindow": "120"},
    ),
    10027: (
        {"user": "full", "storage": "memory"},
        r"raise 'max_streams' of the account",
        {"user": "no_files"},
    ),
}


"""By err_code: the options that the server refuses, the action, and the options that cure it."""


@pytest.fixture(scope="module")
def limited() -> Iterator[str]:
    """URL of a server whose accounts have limits."""
    with configured_server(CONFIG) as server:
        create(server.url, "bucket", name="only", user="full", password="a")
        yield server.url


@pytest.fixture(scope="module")
def small_server() -> Iterator[str]:
    """URL of a server with 4 MB of files and 2 MB of memory for JetStream."""
    with configured_server("jetstream { max_file_store: 4M, max_memory_store: 2M }") as server:
        yield server.url


def create(url: str, target: str, *, name: str = "", **options: str) -> None:
    given = {"servers": url, "ifMissing": "create", **options}
    if target == "bucket":
        prepare_target(kv_write_options({**given, "bucket": name or "b"}))
    else:
        stream, subject = name or "S", name or "s"
        prepare_target(stream_write_options({**given, "stream": stream, "subject": subject}))


@pytest.mark.parametrize("target", ["bucket", "stream"])
def test_creation_in_account_that_requires_size(limited: str, target: str) -> None:
    with pytest.raises(ApiError, match=r"max bytes.*; set the option 'maxBytes'") as refused:
        create(limited, target)
    assert refused.value.err_code == 10113
    with pytest.raises(ApiError, match=r"; set a smaller 'maxBytes'"):
        create(limited, target, maxBytes="5m")
    create(limited, target, **CREATED)
    name = "KV_b" if target == "bucket" else "S"
    config = api(limited, f"STREAM.INFO.{name}")["config"]
    assert (config["max_bytes"], config["compression"]) == (2 << 20, "s2")
    assert config["placement"]["tags"] == ["ssd"]
    assert config["metadata"].items() >= {"owner": "fleet", "cost centre": "7"}.items()


@pytest.mark.parametrize("target", ["bucket", "stream"])
@pytest.mark.parametrize(("storage", "err_code"), [("file", 10047), ("memory", 10028)])
def test_creation_larger_than_room_of_server(
    small_server: str, target: str, storage: str, err_code: int
) -> None:
    with pytest.raises(ApiError, match=r"; set the option 'maxBytes' to a size that") as refused:
        create(small_server, target, maxBytes="5m", storage=storage)
    assert refused.value.err_code == err_code


@pytest.mark.parametrize("target", ["bucket", "stream"])
@pytest.mark.parametrize("err_code", REFUSED)
def test_refused_creation_is_not_retried(
    limited: str, caplog: pytest.LogCaptureFixture, target: str, err_code: int
) -> None:
    given, action, cure = REFUSED[err_code]
    given, name = {**given, "password": "a"}, f"{target}-{err_code}"
    with pytest.raises(ApiError, match=action) as refused:
        create(limited, target, name=name, **given)
    assert refused.value.err_code == err_code
    assert "retrying request" not in caplog.text
    create(limited, target, name=name, **{**given, **cure})


def test_creation_in_account_with_limits_for_other_replicas(tmp_path: Path) -> None:
    credentials = tmp_path / "user.creds"
    none = {"mem_storage": 0, "disk_storage": 0}
    limits = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    operator = Operator(**none, tiered_limits={"R3": limits})
    credentials.write_text(operator.credentials())
    with (
        configured_server(f"jetstream {{}}\n{operator.config()}") as server,
        pytest.raises(ApiError, match=r"set the option 'replicas' to a number") as refused,
    ):
        create(server.url, "bucket", credentials=str(credentials))
    assert refused.value.err_code == 10120


def test_creation_where_no_server_has_tags(cluster: Cluster) -> None:
    with pytest.raises(
        ApiError, match=r"set other 'placementCluster' or 'placementTags'"
    ) as refused:
        create(cluster.url, "bucket", placementTags="none")
    assert refused.value.err_code == 10005
    create(cluster.url, "bucket", placementCluster="test", replicas="3")


@pytest.mark.parametrize("target", ["bucket", "stream"])
def test_target_that_acknowledges_before_it_stores(
    url: str, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    name, subject = ("KV_b", "$KV.b.>") if target == "bucket" else ("S", "s")
    create_stream(url, name, subject, max_msgs_per_subject=1, persist_mode="async")
    create(url, target)
    assert "rows are acknowledged before they are stored" in caplog.text
    with pytest.raises(ConfigurationError, match=r"persist_mode is 'async'.*remove the option"):
        create(url, target, asyncPersist="fail")


CODECS = {"keyCodec": "base64", "valueCodec": "base64"}
PATHS = {"keyCodec": "path,base64"}


@pytest.fixture
def written(spark: SparkSession, url: str) -> Callable[..., None]:
    """Write keys, whose values are the keys, as one batch."""

    def write(bucket: str, keys: list[str], **codecs: str) -> None:
        frame = spark.createDataFrame([(key, key) for key in keys], "key STRING, value STRING")
        writer = frame.write.format("nats_kv").options(servers=url, bucket=bucket)
        writer.options(**codecs, ifMissing="create", history="5").mode("append").save()

    return write


def test_stream_writer_copies_into_other_codecs(
    spark: SparkSession, url: str, written: Callable[..., None], tmp_path: Path
) -> None:
    keys = ["/a/b c", "/a/Ω", "d/e"]
    written("paths", keys, **PATHS)

    def copy(target: str, filters: str, **codecs: str) -> None:
        source = spark.readStream.format("nats_kv").options(servers=url, bucket="paths")
        read = source.options(keys=filters, includeRawKey="true", **PATHS).load()
        sink = read.writeStream.format("nats_kv").options(servers=url, bucket=target, **codecs)
        sink = sink.option("checkpointLocation", str(tmp_path / target)).option(
            "ifMissing", "create"
        )
        run_to_the_end(sink.trigger(availableNow=True).start)

    copy("copied", "/a/>", **CODECS)
    copied = {key: key.encode() for key in keys[:2]}
    assert {
        row["key"]: row["value"] for row in read_batch(url, bucket="copied", **CODECS)
    } == copied
    with pytest.raises(PySparkException, match=r"bucket 'refused': key '/a/.*': expected letters"):
        copy("refused", ">", keyCodec="path")
    with pytest.raises(PySparkException, match=r"key '/a/': it would be stored as '_root_\.a', wh"):
        written("refused", ["/a/"], keyCodec="path")
    assert read_batch(url, bucket="refused") == []


def test_conflict_names_decoded_key(
    spark: SparkSession, url: str, written: Callable[..., None]
) -> None:
    written("conflict", ["a b"], **CODECS)
    frame = spark.createDataFrame(
        [("a b", "2", 7)], "key STRING, value STRING, expected_revision INT"
    )
    writer = frame.write.format("nats_kv").options(servers=url, bucket="conflict", **CODECS)
    with pytest.raises(PySparkException, match="could not write key 'a b' of bucket 'conflict'"):
        writer.mode("append").save()


GOOD = [
    "key STRING, value STRING",
    "key STRING, value BINARY",
    "key STRING, operation STRING",
    "key STRING, value BINARY, expected_revision INT, ttl SMALLINT",
    columns_read("nats_kv", ("includeHeaders", "includeOrigin", "includeRawKey")),
]

BAD = [
    ("value STRING", "column 'key' is missing, expected key STRING, value BINARY or STRING"),
    ("key INT, value STRING", "column 'key' is INT, expected STRING; cast it"),
    ("key STRING, value STRUCT<a: INT>", "column 'value' is STRUCT<A:INT>, expected BINARY or"),
    ("key STRING, valeu STRING", "column 'valeu' is unknown, .*; rename it to 'value', or select"),
    ("key STRING, value STRING, sequence BIGINT", "column 'sequence' is unknown"),
    ("key STRING, value STRING, ttl DOUBLE", "column 'ttl' is DOUBLE, expected BIGINT"),
    ("key STRING, value STRING, Bucket STRING", "column 'Bucket' is unknown"),
    ("key STRING, key STRING", "column 'key' occurs twice; rename or drop"),
    (
        "key STRING, value STRING, headers MAP<STRING, STRING>",
        "column 'headers' is MAP<STRING,STRING>, expected MAP<STRING, ARRAY<STRING>>",
    ),
]


@pytest.mark.parametrize("ddl", GOOD)
def test_columns_of_bucket(spark: SparkSession, ddl: str) -> None:
    validate_columns(StructType.fromDDL(ddl), "nats_kv")


@pytest.mark.parametrize(("ddl", "problem"), BAD)
def test_refused_columns_of_bucket(spark: SparkSession, ddl: str, problem: str) -> None:
    with pytest.raises(OptionError, match=f"could not write with format 'nats_kv': {problem}"):
        validate_columns(StructType.fromDDL(ddl), "nats_kv")


def test_columns_of_stream(spark: SparkSession) -> None:
    validate_columns(
        StructType.fromDDL(columns_read("nats_stream", ("includeHeaders",))), "nats_stream"
    )
    validate_columns(StructType.fromDDL("data STRING, msg_id STRING"), "nats_stream")
    with pytest.raises(OptionError, match="column 'data' is missing"):
        validate_columns(StructType.fromDDL("subject STRING"), "nats_stream")
