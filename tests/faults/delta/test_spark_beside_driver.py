"""Spark and the driver commit one version: Delta Lake's commit replaces that of the driver.

In S3 its PUT has no condition, on a local disk it renames by rename(2). Both are held here until
the driver has committed. As a program with ``"ENDPOINT TABLE KEY REVISION"`` (the endpoint of an
object store, or ``disk``), this module merges one entry by Spark.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyspark
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from nats_stream_source.delta import configure, merge
from nats_stream_source.errors import TableError
from nats_stream_source.spark.session import delta_artifact
from tests.integration.delta.driver.in_process import InProcessTable
from tests.integration.delta.merge_model import SCHEMA, put
from tests.support.delta import rows_of
from tests.support.object_store import BUCKET, object_store, store_proxy
from tests.support.spark.processes import driver_process
from tests.support.wait import wait_until

_MODULE = "tests.faults.delta.test_spark_beside_driver"
_START = 300.0  # seconds; the first start downloads hadoop-aws


@dataclass(frozen=True)
class Place:
    """Where the table is, and how a commit of Spark is held there."""

    path: str
    spark: str  # endpoint and path for Spark
    held: Callable[[], object]
    resume: Callable[[], object]
    options: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def in_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with object_store() as store, store_proxy(store.url) as proxy:
        proxy.delay = True
        yield Place(
            f"s3://{BUCKET}/fleet",
            f"{proxy.url} s3a://{BUCKET}/fleet",
            proxy.held.is_set,
            proxy.resume.set,
            store.storage_options,
        )


@contextlib.contextmanager
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    library, gate = tmp_path / "delayed_rename.so", tmp_path / "gate"
    source = Path(__file__).with_name("delayed_rename.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("RENAME_GATE", str(gate))
    path = tmp_path / "fleet"
    yield Place(str(path), f"disk {path}", Path(f"{gate}.held").exists, gate.touch)


@pytest.mark.faults
@pytest.mark.parametrize("place", [in_s3, on_disk])
def test_commit_that_spark_replaces_ends_query_of_driver(
    place: Callable[..., contextlib.AbstractContextManager[Place]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = tmp_path / "spark.log"
    with place(tmp_path, monkeypatch) as at, log.open("wb") as output:
        table = InProcessTable(at.path, storage_options=at.options or None)
        options = at.options or None
        table.merge(put("a", 1), put("b", 2))
        version = DeltaTable(table.path, storage_options=options).version() + 1
        with driver_process(_MODULE, f"{at.spark} c 3", output) as process:

            def alive() -> None:
                assert process.poll() is None, log.read_text()

            wait_until(at.held, "Spark's commit arrives", _START, alive=alive)
            table.merge(put("a", 4))
            own = rows_of(DeltaTable(table.path, version=version, storage_options=options))
            assert {row["key"]: row["revision"] for row in own} == {"a": 4, "b": 2}
            at.resume()
            assert process.wait(_START) == 0, log.read_text()
        found = rows_of(DeltaTable(table.path, version=version, storage_options=options))
        replaced = {row["key"]: row["revision"] for row in found}
        assert replaced == {"a": 1, "b": 2, "c": 3}, "Spark's commit did not replace the driver's"
        if at.options:
            assert "Spark's commits can replace those of other writers" in log.read_text()
        with pytest.raises(TableError, match=f"has replaced its version {version}, and the rows"):
            table.merge(put("b", 5))
        # The way back: another query replays the entries.
        table.reopen()
        table.merge(put("a", 4), put("b", 5))
        found = rows_of(DeltaTable(table.path, storage_options=options))
        assert {row["key"]: row["revision"] for row in found} == {"a": 4, "b": 5, "c": 3}


# pyspark's jars have the version of Hadoop that hadoop-aws must have.
_HADOOP = {"4.2": "3.5.0"}


def main() -> None:
    endpoint, table, key, revision = sys.argv[1].split()
    packages = delta_artifact()
    if endpoint != "disk":
        hadoop = _HADOOP[".".join(pyspark.__version__.split(".")[:2])]
        packages += f",org.apache.hadoop:hadoop-aws:{hadoop}"
    settings = {
        "endpoint": endpoint,
        "endpoint.region": "us-east-1",
        "path.style.access": "true",
        "access.key": "test",
        "secret.key": "test",
        "connection.expect.continue": "false",
    }
    builder = configure(SparkSession.builder.master("local[2]"), delta=True, small_machine=True)
    builder = builder.config("spark.jars.packages", packages).config("spark.ui.enabled", "false")
    for name, value in settings.items():
        builder = builder.config(f"spark.hadoop.fs.s3a.{name}", value)
    spark = builder.getOrCreate()
    batch = spark.createDataFrame([put(key, int(revision)).row()], SCHEMA)
    merge(batch, table, engine="spark", upkeep=None)
    print("merged", flush=True)


if __name__ == "__main__":
    main()
