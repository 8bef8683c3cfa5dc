"""``reconcile``: rows of keys that their bucket lacks, and older values that are current again."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession, functions as F

from nats_stream_source.delta import Deletes, ReconcileResult, compare_with_bucket, reconcile
from nats_stream_source.delta.tables import Table
from nats_stream_source.errors import (
    BucketNotFoundError,
    ConfigurationError,
    DataLossError,
    InvalidNameError,
    MinLastSequenceError,
    OptionError,
)
from tests.integration.delta.merge_model import (
    Bucket,
    Entry,
    Frame,
    Merge,
    Reconciled,
    both_modes,
    by_driver,
    history_of,
    live,
    spark_in_faults,
    stored,
    version,
)
from tests.support.nats.backup import back_up
from tests.support.nats.buckets import api
from tests.support.wait import wait_until

pytestmark = pytest.mark.delta
engines_and_deletes = pytest.mark.parametrize(
    ("engine", "deletes"),
    [
        ("driver", "remove"),
        ("driver", "mark"),
        ("spark", "mark"),
        pytest.param("spark", "remove", marks=pytest.mark.faults),
    ],
    indirect=["engine"],
)


@engines_and_deletes
def test_reconcile(
    table: Path, bucket: Bucket, reconciled: Reconciled, deletes: Deletes, merge_entries: Merge
) -> None:
    """Keys purged without a marker, deleted with an unread one, or rewritten; then a second run.

    The row of another bucket stays.
    """
    read = bucket.write(*((key, "PUT") for key in ("a", "b.c", "d", "e", "f")))
    merge_entries(*read, dataclasses.replace(read[0], bucket="yard", key="z"), deletes=deletes)
    before = version(table)
    assert reconciled(deletes=deletes) == ReconcileResult(0, 5, 0, last_seq=5)
    assert version(table) == before

    unread = bucket.write(("d", "DEL"), ("e", "PURGE"), ("f", "DEL"), ("f", "PUT"), ("a", "PUT"))
    bucket.purge_subjects("a", "b.c")
    assert reconciled(deletes=deletes) == ReconcileResult(4, 1, 0, last_seq=10)
    assert live(table) == {"f": 5, "z": 1}
    if deletes == "mark":
        names = ("key", "value", "revision", "operation", "deleted")
        assert [tuple(row[name] for name in names) for row in stored(table)] == [
            ("a", None, 10, "PURGE", True),
            ("b.c", None, 10, "PURGE", True),
            ("d", None, 6, "DEL", True),
            ("e", None, 7, "PURGE", True),
            ("f", b"x", 5, "PUT", False),
            ("z", b"x", 1, "PUT", False),
        ]
    before = version(table)
    assert reconciled(deletes=deletes) == ReconcileResult(0, 1, 0, last_seq=10)
    assert version(table) == before

    # A replay of the earlier entries: a mark rejects them, also the PUT that was never merged.
    if deletes == "mark":
        merge_entries(*read, *unread, deletes=deletes)
        assert live(table) == {"f": 9, "z": 1}
    again = bucket.write(("a", "PUT"))
    merge_entries(*again, deletes=deletes)
    assert live(table)["a"] == 11


@both_modes
@spark_in_faults
def test_reconcile_with_recreated_bucket(
    table: Path, bucket: Bucket, reconciled: Reconciled, deletes: Deletes, merge_entries: Merge
) -> None:
    old = bucket.write(*((key, "PUT") for key in "abcd"))
    merge_entries(*old, deletes=deletes)
    bucket.delete()
    bucket.create()
    new = bucket.write(("b", "PUT"))
    assert reconciled(deletes=deletes) == ReconcileResult(3, 1, 0, last_seq=1)
    assert live(table) == {"b": 2}  # until the query reads the re-created bucket
    merge_entries(*new, deletes=deletes)
    assert live(table) == {"b": 1}
    if deletes == "mark":
        merge_entries(*old, deletes=deletes)
        assert live(table) == {"b": 1}


@by_driver
def test_reconcile_with_bucket_restored_from_older_backup(
    table: Path, bucket: Bucket, reconciled: Reconciled, merge_entries: Merge
) -> None:
    """The value of key "a" in the table is newer than the bucket's: the query never corrects it."""
    merge_entries(*bucket.write(("a", "PUT"), ("b", "PUT")))
    restore = back_up(bucket.url, f"KV_{bucket.name}")
    merge_entries(*bucket.write(("a", "PUT"), ("c", "PUT")))
    restore()
    before = stored(table)
    with pytest.raises(DataLossError, match=r"revision [34] of key '[ac]'.*last sequence .* is 2"):
        reconciled()
    assert stored(table) == before


@by_driver
def test_reconcile_with_mirror_that_lags(
    table: Path, bucket: Bucket, reconciled: Reconciled, merge_entries: Merge
) -> None:
    """A re-created mirror is empty at first: its keys are not missing."""
    merge_entries(*bucket.write(("a", "PUT"), ("b", "PUT")))
    bucket.delete()
    stream = f"KV_{bucket.name}"
    config = {"name": stream, "mirror": {"name": f"{stream}_origin"}, "max_msgs_per_subject": 3}
    api(bucket.url, f"STREAM.CREATE.{stream}", config)
    before = stored(table)
    with pytest.raises(MinLastSequenceError, match=r"revision 2 of key 'b'.* has reached 0 "):
        reconciled()
    assert stored(table) == before


@by_driver
def test_reconcile_refuses(
    spark: SparkSession, frame: Frame, tmp_path: Path, bucket: Bucket, merge: Merge
) -> None:
    (entry,) = bucket.write(("a", "PUT"))
    beyond = dataclasses.replace(entry, revision=2)
    later = dataclasses.replace(entry, stream_created=entry.stream_created + timedelta(seconds=1))
    wild = dataclasses.replace(entry, key="a.*")
    tables = {"good": entry, "beyond": beyond, "later": later, "wild": wild}
    for name, one in tables.items():
        write_deltalake(tmp_path / name, frame(one).drop("delta", "initial").toArrow())
    merge(frame(entry), tmp_path / "sequence", sequence_by="created")
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
        ("sequence", ConfigurationError, "expected those of a bucket's entries", {}),
    ]
    for name, error, message, arguments in refused:
        with pytest.raises(error, match=message):
            reconcile(
                spark,
                str(tmp_path / name),
                **{"bucket": bucket.name, "servers": bucket.url, **arguments},
            )
    for name in (*tables, "sequence"):
        assert len(stored(tmp_path / name)) == 1


# Rows whose revision expired while the bucket has an older one of the key.

REMOVE, MARK, HISTORY = {"deletes": "remove"}, {"deletes": "mark"}, {"stored_as_scd_type": 2}
kinds = pytest.mark.parametrize("kind", [REMOVE, MARK, HISTORY], ids=["remove", "mark", "history"])

Expired = Callable[..., list[Entry]]


@pytest.fixture
def expired(bucket: Bucket, frame: Frame, table: Path, merge: Merge) -> Expired:
    """Function that merges an entry of each key and a newer one, which expires.

    Returns:
        The entries that are current again.
    """

    def write(*keys: str, old: bytes = b"old", parsed: bool = False, **kind: Any) -> list[Entry]:
        puts, stay = [(key, "PUT") for key in keys], bucket.state()["messages"] + len(keys)
        older = bucket.write(*puts, value=old, headers={"unit": "kWh"})
        newer = bucket.write(*puts, value=b"short", headers={"Nats-TTL": "1s"})
        rows = frame(*older, *newer)
        rows = rows.withColumn("text", F.col("value").cast("string")) if parsed else rows
        merge(rows, str(table), **kind)
        wait_until(lambda: bucket.state()["messages"] == stay, "the entries expire")
        return older

    return write


@spark_in_faults
@pytest.mark.parametrize(
    ("following", "expected"),
    [
        (("k", "PUT"), [("k", b"x", 3, None)]),
        (("k", "DEL"), []),
        (("l", "PUT"), [("k", b"old", 3, None), ("l", b"x", 3, None)]),
        (None, []),
    ],
    ids=["put", "delete", "other-key", "purge"],
)
def test_history_closes_version_and_opens_older_value(
    following: tuple[str, str] | None,
    expected: list[tuple[Any, ...]],
    expired: Expired,
    table: Path,
    bucket: Bucket,
    reconciled: Reconciled,
    merge_entries: Merge,
) -> None:
    """The versions end after the stream's last message, and the next one gets that sequence."""
    older = expired("k", **HISTORY)
    closed = [("k", b"old", 1, 2), ("k", b"short", 2, 3)]
    assert reconciled() == ReconcileResult(0, 0, 0, last_seq=2, replaced=1)
    assert history_of(table) == [*closed, ("k", b"old", 3, None)]
    (opened,) = (row for row in stored(table) if row["__END_AT"] is None)
    assert (opened["revision"], opened["created"]) == (1, bucket.created(1))
    before = version(table)
    assert reconciled() == ReconcileResult(0, 1, 0, last_seq=2)
    assert version(table) == before
    if following is None:
        bucket.purge_subjects("k")
        assert reconciled() == ReconcileResult(1, 0, 0, last_seq=2)
        assert history_of(table) == closed
        following, expected = ("k", "PUT"), [("k", b"x", 3, None)]
    batch = [*older, *bucket.write(following)]
    for _repeat in range(2):
        merge_entries(*batch, **HISTORY)
        assert history_of(table) == [*closed, *expected]


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        *(("driver", kind) for kind in (REMOVE, MARK, HISTORY)),
        ("spark", MARK),
        *(pytest.param("spark", kind, marks=pytest.mark.faults) for kind in (REMOVE, HISTORY)),
    ],
    indirect=["engine"],
)
def test_older_values_and_missing_keys_beside_query(
    kind: dict[str, Any],
    expired: Expired,
    bucket: Bucket,
    table: Path,
    merge_entries: Merge,
    reconciled: Reconciled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A query merges new values of a missing key and of one with an older value, once compared.

    The last entry of key "d" has the same value as the one before, and no marker of "b" is read.
    """
    merge_entries(*bucket.write(("a", "PUT"), ("b", "PUT"), ("d", "PUT"), ("d", "PUT")), **kind)
    bucket.write(("b", "DEL"))
    bucket.purge_subjects("a", "d")
    back, deletes = expired("k", "l", **kind), kind.get("deletes", "remove")
    compare = compare_with_bucket.find_differences

    def query() -> None:
        merge_entries(*bucket.write(("a", "PUT"), ("k", "PUT"), value=b"new"), **kind)

    async def compare_before_query(*arguments: Any) -> Any:
        outcome = await compare(*arguments)
        await asyncio.to_thread(query)
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(compare_with_bucket, "find_differences", compare_before_query)
        result = reconciled(deletes=deletes)
    assert result == ReconcileResult(2, 0, changed=2, last_seq=9, replaced=1)
    if kind is HISTORY:
        of_missing = [("a", b"x", 1, 10), ("a", b"new", 10, None), ("b", b"x", 2, 5)]
        of_missing += [("d", b"x", 3, 10)]
        of_k = [("k", b"old", 6, 8), ("k", b"short", 8, 11), ("k", b"new", 11, None)]
        of_l = [("l", b"old", 7, 9), ("l", b"short", 9, 10), ("l", b"old", 10, None)]
        assert history_of(table) == of_missing + of_k + of_l
    else:
        assert live(table) == {"a": 10, "k": 11, "l": 7}
    current = [row for row in stored(table) if not (row.get("deleted") or row.get("__END_AT"))]
    older = {name: current[-1][name] for name in ("key", "value", "revision", "operation")}
    assert older == {"key": "l", "value": b"old", "revision": 7, "operation": "PUT"}
    assert current[-1]["created"] == bucket.created(7)
    before = version(table)
    assert reconciled(deletes=deletes) == ReconcileResult(0, 3, 0, last_seq=11)
    assert version(table) == before
    merge_entries(back[1], *bucket.write(("l", "PUT")), **kind)
    assert max(row["revision"] for row in stored(table)) == 12


@kinds
@by_driver
def test_crash_between_removal_and_replacement_mended_by_next_call(
    kind: dict[str, Any],
    expired: Expired,
    bucket: Bucket,
    table: Path,
    reconciled: Reconciled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expired("k", "l", **kind)
    bucket.purge_subjects("l")
    merge_batch, calls = Table.merge, itertools.count(1)

    def fail_at_second(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return merge_batch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Table, "merge", fail_at_second)
        with pytest.raises(KeyboardInterrupt):
            reconciled(deletes=kind.get("deletes", "remove"))
    result = reconciled(deletes=kind.get("deletes", "remove"))
    assert result == ReconcileResult(0, 0, 0, last_seq=4, replaced=1)
    current = [row for row in stored(table) if not (row.get("deleted") or row.get("__END_AT"))]
    assert [(row["key"], row["value"], row["revision"]) for row in current] == [("k", b"old", 1)]


@by_driver
def test_older_value_decoded(
    expired: Expired, bucket: Bucket, table: Path, reconciled: Reconciled
) -> None:
    expired("k", old=base64.urlsafe_b64encode(b"plain").rstrip(b"="))
    assert reconciled(value_codec="base64").replaced == 1
    assert [row["value"] for row in stored(table)] == [b"plain"]


@kinds
@by_driver
def test_table_with_parsed_values_keeps_rows_with_warning(
    kind: dict[str, Any],
    expired: Expired,
    table: Path,
    reconciled: Reconciled,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expired("k", parsed=True, **kind)
    before = stored(table)
    result = reconciled(deletes=kind.get("deletes", "remove"))
    assert result == ReconcileResult(0, 1, 0, last_seq=2)
    assert stored(table) == before
    (record,) = (one for one in caplog.records if "older value is unknown" in one.message)
    assert "rows=1" in record.message
