"""Spark and the driver commit one version in S3: Delta Lake's PUT has no condition."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from nats_stream_source.errors import TableError
from tests.integration.delta.driver.in_process import InProcessTable
from tests.integration.delta.merge_model import put
from tests.support.delta import rows_of
from tests.support.object_store import BUCKET, object_store
from tests.support.spark.driver_process import driver_process
from tests.support.store_proxy import store_proxy
from tests.support.wait import wait_until

_MODULE = "tests.faults.delta.s3_writer"
_START = 300.0  # seconds; the first start downloads hadoop-aws


@pytest.mark.faults
def test_commit_that_spark_replaces_ends_query_of_driver(tmp_path: Path) -> None:
    log = tmp_path / "spark.log"
    with object_store() as store, store_proxy(store.url) as proxy, log.open("wb") as output:
        options = store.storage_options
        table = InProcessTable(f"s3://{BUCKET}/fleet", storage_options=options)
        table.merge(put("a", 1), put("b", 2))
        version = DeltaTable(table.path, storage_options=options).version() + 1
        proxy.delay = True
        argument = f"{proxy.url} s3a://{BUCKET}/fleet c 3"
        with driver_process(_MODULE, argument, output) as process:

            def alive() -> None:
                assert process.poll() is None, log.read_text()

            wait_until(proxy.held.is_set, "Spark's commit arrives", _START, alive=alive)
            table.merge(put("a", 4))
            own = rows_of(DeltaTable(table.path, version=version, storage_options=options))
            assert {row["key"]: row["revision"] for row in own} == {"a": 4, "b": 2}
            proxy.resume.set()
            assert process.wait(_START) == 0, log.read_text()
        found = rows_of(DeltaTable(table.path, version=version, storage_options=options))
        replaced = {row["key"]: row["revision"] for row in found}
        assert replaced == {"a": 1, "b": 2, "c": 3}, "Spark's commit did not replace the driver's"
        assert "Spark's commits can replace those of other writers" in log.read_text()
        with pytest.raises(TableError, match=f"has replaced its version {version}, and the rows"):
            table.merge(put("b", 5))
        # The way back: another query replays the entries.
        table.reopen()
        table.merge(put("a", 4), put("b", 5))
        found = rows_of(DeltaTable(table.path, storage_options=options))
        assert {row["key"]: row["revision"] for row in found} == {"a": 4, "b": 5, "c": 3}
