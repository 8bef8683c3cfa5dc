"""``reconcile`` removes or marks the rows of keys that their bucket no longer has."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from nats_stream_source.delta import Deletes, ReconcileResult, reconcile
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import (
    BucketNotFoundError,
    ConfigurationError,
    DataLossError,
    InvalidNameError,
    MinLastSequenceError,
    OptionError,
)
from tests.integration.delta.kv_bucket import Bucket, Reconciled
from tests.integration.delta.merge_model import (
    Frame,
    Merge,
    by_driver,
)
from tests.integration.delta.table_content import live, marks, stored, version
from tests.support.nats.backup import back_up
from tests.support.nats.buckets import api

pytestmark = pytest.mark.delta
engines_and_modes = pytest.mark.parametrize(
    ("engine", "deletes"),
    [
        *(("driver", deletes) for deletes in ("remove", "mark")),
        pytest.param("spark", "mark", marks=pytest.mark.faults),
    ],
    indirect=["engine"],
)


@pytest.mark.parametrize(
    ("engine", "deletes"),
    [
        ("driver", "remove"),
        ("driver", "mark"),
        ("spark", "mark"),
        pytest.param("spark", "remove", marks=pytest.mark.faults),
    ],
    indirect=["engine"],
)
def test_reconcile(
    frame: Frame,
    table: Path,
    bucket: Bucket,
    reconciled: Reconciled,
    deletes: Deletes,
    merge: Merge,
) -> None:
    """Keys purged without a marker, deleted with an unread one, or rewritten; then a second run."""
    read = bucket.write(*((key, "PUT") for key in ("a", "b.c", "d", "e", "f")))
    merge(frame(*read), str(table), deletes=deletes)
    before = version(table)
    assert reconciled(deletes=deletes) == ReconcileResult(0, 5, 0, last_seq=5)
    assert version(table) == before

    unread = bucket.write(("d", "DEL"), ("e", "PURGE"), ("f", "DEL"), ("f", "PUT"), ("a", "PUT"))
    bucket.purge_subjects("a", "b.c")
    assert reconciled(deletes=deletes) == ReconcileResult(4, 1, 0, last_seq=10)
    assert live(table) == {"f": 5}
    if deletes == "mark":
        assert marks(table) == {
            "a": (10, "PURGE"),
            "b.c": (10, "PURGE"),
            "d": (6, "DEL"),
            "e": (7, "PURGE"),
        }
        assert [row["value"] for row in stored(table)] == [None, None, None, None, b"x"]
    before = version(table)
    assert reconciled(deletes=deletes) == ReconcileResult(0, 1, 0, last_seq=10)
    assert version(table) == before

    # A replay of the earlier entries: a mark rejects them, also the PUT that was never merged.
    if deletes == "mark":
        merge(frame(*read, *unread), str(table), deletes=deletes)
        assert live(table) == {"f": 9}
    again = bucket.write(("a", "PUT"))
    merge(frame(*again), str(table), deletes=deletes)
    assert live(table)["a"] == 11


@engines_and_modes
def test_reconcile_beside_query(
    frame: Frame,
    table: Path,
    bucket: Bucket,
    reconciled: Reconciled,
    deletes: Deletes,
    monkeypatch: pytest.MonkeyPatch,
    merge: Merge,
) -> None:
    """A query merges a new value of a key after the leader reported the key as missing."""
    merge(frame(*bucket.write(("a", "PUT"), ("b", "PUT"))), str(table), deletes=deletes)
    bucket.purge_subjects("a", "b")
    # As an attribute of the package, the name is the function.
    module = importlib.import_module("nats_stream_source.delta.compare_with_bucket")
    compare = module.find_differences

    async def compare_then_merge(*arguments: Any) -> Any:
        outcome = await compare(*arguments)
        await asyncio.to_thread(
            lambda: merge(frame(*bucket.write(("a", "PUT"))), str(table), deletes=deletes)
        )
        return outcome

    monkeypatch.setattr(module, "find_differences", compare_then_merge)
    assert reconciled(deletes=deletes) == ReconcileResult(1, 0, changed=1, last_seq=2)
    assert live(table) == {"a": 3}


@engines_and_modes
def test_reconcile_with_recreated_bucket(
    frame: Frame,
    table: Path,
    bucket: Bucket,
    reconciled: Reconciled,
    deletes: Deletes,
    merge: Merge,
) -> None:
    old = bucket.write(*((key, "PUT") for key in "abcd"))
    merge(frame(*old), str(table), deletes=deletes)
    bucket.delete()
    bucket.create()
    new = bucket.write(("b", "PUT"))
    assert reconciled(deletes=deletes) == ReconcileResult(3, 1, 0, last_seq=1)
    assert live(table) == {"b": 2}  # until the query reads the re-created bucket
    merge(frame(*new), str(table), deletes=deletes)
    assert live(table) == {"b": 1}
    if deletes == "mark":
        merge(frame(*old), str(table), deletes=deletes)
        assert live(table) == {"b": 1}


@by_driver
def test_reconcile_with_restored_bucket(
    frame: Frame, table: Path, bucket: Bucket, reconciled: Reconciled, merge: Merge
) -> None:
    """nats-server 2.15 gives it a new creation time; the rows have the earlier one."""
    merge(frame(*bucket.write(("a", "PUT"), ("b", "PUT"), ("c", "PUT"))), str(table))
    back_up(bucket.url, f"KV_{bucket.name}")()
    assert reconciled() == ReconcileResult(0, 3, 0, last_seq=3)
    bucket.purge_subjects("a")
    assert reconciled() == ReconcileResult(1, 2, 0, last_seq=3)
    assert live(table) == {"b": 2, "c": 3}


@by_driver
def test_reconcile_with_bucket_restored_from_older_backup(
    frame: Frame, table: Path, bucket: Bucket, reconciled: Reconciled, merge: Merge
) -> None:
    """The value of key "a" in the table is newer than the bucket's: the query never corrects it."""
    merge(frame(*bucket.write(("a", "PUT"), ("b", "PUT"))), str(table))
    restore = back_up(bucket.url, f"KV_{bucket.name}")
    merge(frame(*bucket.write(("a", "PUT"), ("c", "PUT"))), str(table))
    restore()
    before = stored(table)
    with pytest.raises(DataLossError, match=r"revision [34] of key '[ac]'.*last sequence .* is 2"):
        reconciled()
    assert stored(table) == before


@by_driver
def test_reconcile_with_mirror_that_lags(
    frame: Frame, table: Path, bucket: Bucket, reconciled: Reconciled, merge: Merge
) -> None:
    """A re-created mirror is empty at first: its keys are not missing."""
    merge(frame(*bucket.write(("a", "PUT"), ("b", "PUT"))), str(table))
    bucket.delete()
    stream = f"KV_{bucket.name}"
    config = {"name": stream, "mirror": {"name": f"{stream}_origin"}, "max_msgs_per_subject": 3}
    api(bucket.url, f"STREAM.CREATE.{stream}", config)
    before = stored(table)
    with pytest.raises(MinLastSequenceError, match=r"revision 2 of key 'b'.* has reached 0 "):
        reconciled()
    assert stored(table) == before


@by_driver
def test_reconcile_after_max_age(
    frame: Frame, table: Path, shared_server: NatsServer, reconciled: Reconciled, merge: Merge
) -> None:
    bucket = Bucket(shared_server.url, "aging").create(max_age=10**9, duplicate_window=10**9)
    merge(frame(*bucket.write(("a", "PUT"), ("b", "PUT"))), str(table))
    deadline = time.monotonic() + 20
    while bucket.state()["messages"]:
        assert time.monotonic() < deadline, "max_age removed no message"
        time.sleep(0.05)
    assert reconciled(bucket="aging").removed == 2
    assert stored(table) == []


@by_driver
def test_reconcile_touches_its_own_bucket_only(
    frame: Frame, table: Path, bucket: Bucket, reconciled: Reconciled, merge: Merge
) -> None:
    (entry,) = bucket.write(("a", "PUT"))
    merge(frame(entry, dataclasses.replace(entry, bucket="yard")), str(table))
    bucket.purge_subjects("a")
    assert reconciled() == ReconcileResult(1, 0, 0, last_seq=1)
    assert [row["bucket"] for row in stored(table)] == ["yard"]


def test_reconcile_refuses(
    spark: SparkSession, frame: Frame, tmp_path: Path, bucket: Bucket
) -> None:
    (entry,) = bucket.write(("a", "PUT"))
    beyond = dataclasses.replace(entry, revision=2)
    later = dataclasses.replace(entry, stream_created=entry.stream_created + timedelta(seconds=1))
    wild = dataclasses.replace(entry, key="a.*")
    tables = {"good": entry, "beyond": beyond, "later": later, "wild": wild}
    for name, one in tables.items():
        write_deltalake(tmp_path / name, frame(one).drop("delta", "initial").toArrow())
    refused: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
        ("none", ConfigurationError, "no Delta table found", {}),
        ("good", ConfigurationError, "no column 'deleted'", {"deletes": "mark"}),
        ("good", ConfigurationError, "expected 'remove' or 'mark'", {"deletes": "drop"}),
        ("good", BucketNotFoundError, "'absent' does not exist", {"bucket": "absent"}),
        ("good", InvalidNameError, "not a bucket name", {"bucket": "a.b"}),
        ("good", OptionError, "'serverz'", {"serverz": "x"}),
        ("beyond", DataLossError, "revision 2 .* last sequence of bucket .* is 1", {}),
        ("later", ConfigurationError, "created later", {}),
        ("wild", InvalidNameError, "not a valid key", {}),
    ]
    for name, error, message, arguments in refused:
        with pytest.raises(error, match=message):
            reconcile(
                spark,
                str(tmp_path / name),
                **{"bucket": bucket.name, "servers": bucket.url, **arguments},
            )
    for name in tables:
        assert len(stored(tmp_path / name)) == 1
