"""A follower: what its table has, where it continues, what it refuses, in turns with Spark."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from nats_stream_source.delta import follow
from nats_stream_source.delta.follower import follower, run
from nats_stream_source.errors import (
    BucketNotFoundError,
    ConfigurationError,
    DataLossError,
    JetStreamNotEnabledError,
    OptionError,
    TableError,
    UnsupportedStreamError,
)
from tests.integration.follower.conftest import Followed, before_next, of_bucket, reaches
from tests.support.delta import rows, values
from tests.support.follower import positions, version
from tests.support.nats import buckets
from tests.support.wait import wait_until_async


def log(table: Path) -> list[list[dict[str, Any]]]:
    """The actions of each entry of the log."""
    entries = sorted((table / "_delta_log").glob("*.json"))
    return [[json.loads(line) for line in entry.read_text().splitlines()] for entry in entries]


def sequences(table: Path) -> list[int | None]:
    """The sequence of the position in each entry of the log; None without one."""
    at = {one.version: one.sequence for one in positions(table)}
    return [at.get(number) for number in range(version(table) + 1)]


# -- what the table has -------------------------------------------------------------------------


@of_bucket(history=3)
async def test_table_has_columns_and_rows_of_nats_kv(followed: Followed) -> None:
    followed.put("a=1", "b=1", "a=2")
    followed.delete("b")
    progress = await followed.once()
    assert (progress.rows, progress.keys, progress.caught_up) == (2, 1, True)
    (row,) = rows(followed.table)
    assert list(row) == [
        "bucket",
        "key",
        "value",
        "revision",
        "created",
        "operation",
        "stream_created",
    ]
    assert (row["bucket"], row["key"], row["value"], row["revision"]) == ("fleet", "a", b"2", 3)


async def test_deleted_key_is_marked_with_mark(followed: Followed) -> None:
    async with followed.following(deletes="mark") as follower:
        followed.put("a=1")
        followed.delete("a")
        await reaches(follower, 2)
    (row,) = rows(followed.table)
    assert (row["revision"], row["deleted"], row["value"]) == (2, True, None)


@of_bucket(history=5)
async def test_history_has_versions_of_all_revisions(followed: Followed) -> None:
    followed.put("a=1", "a=2")
    followed.delete("a")
    async with followed.following(history=True) as follower:
        followed.put("a=3")
        await reaches(follower, 4)
    found = rows(followed.table)
    assert [(row["value"], row["revision"]) for row in found] == [(b"1", 1), (b"2", 2), (b"3", 4)]
    assert [row["__END_AT"] and row["__END_AT"]["revision"] for row in found] == [2, 3, None]
    assert [row["valid_to"] is None for row in found] == [False, False, True]
    state = log(Path(f"{followed.table}__cdc_state"))
    assert not any("txn" in action for actions in state for action in actions)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keys": "a.*"}, {"a.x": b"1"}),
        ({"startSequence": "2"}, {"b.x": b"1", "c": b"2"}),
        ({"metaOnly": "true"}, {"a.x": None, "b.x": None, "c": None}),
        ({"keyCodec": "path"}, {"a/x": b"1", "b/x": b"1", "c": b"2"}),
        ({"maxRowsPerTrigger": "1"}, {"a.x": b"1", "b.x": b"1", "c": b"2"}),
        ({"maxBytesPerTrigger": "1"}, {"a.x": b"1", "b.x": b"1", "c": b"2"}),
    ],
)
async def test_option_has_meaning_of_nats_kv(
    followed: Followed, options: dict[str, str], expected: dict[str, bytes]
) -> None:
    followed.put("a.x=1", "b.x=1", "c=1", "c=2")
    progress = await followed.once(**options)
    assert values(followed.table) == expected
    if "maxRowsPerTrigger" in options:
        assert progress.commits == 3


async def test_updates_only_starts_with_next_put_also_after_crash(followed: Followed) -> None:
    followed.put("a=1")
    await followed.once(updatesOnly="true")
    followed.put("b=1")
    await followed.once(updatesOnly="true")
    assert values(followed.table) == {"b": b"1"}


# -- where it continues -------------------------------------------------------------------------


async def test_restart_continues_after_position(followed: Followed) -> None:
    followed.put("a=1", "b=1")
    await followed.once()
    followed.put("c=1")
    progress = await followed.once()
    assert (progress.rows, set(values(followed.table))) == (1, {"a", "b", "c"})
    assert sequences(followed.table) == [None, 2, 3]


async def test_idle_follower_makes_no_commit(followed: Followed) -> None:
    followed.put("a=1")
    async with followed.following():
        await asyncio.sleep(1.5)  # three heartbeats
    assert sequences(followed.table) == [None, 1]


async def test_position_without_rows_is_committed_when_late(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_POSITION_LAG", 1.0)
    followed.put("a=1")
    async with followed.following(keys="a"):
        followed.put("b=1", "b=2")
        await wait_until_async(lambda: sequences(followed.table)[-1] == 3, "the position is 3")
    assert sequences(followed.table) == [None, 1, 3]


async def test_position_without_rows_is_committed_at_stop(followed: Followed) -> None:
    followed.put("a=1")
    async with followed.following(keys="a") as follower:
        followed.put("b=1")
        await reaches(follower, 2)
        assert sequences(followed.table) == [None, 1]
    assert sequences(followed.table) == [None, 1, 2]


async def test_compaction_has_no_position(followed: Followed) -> None:
    async with followed.following() as follower:
        for number in range(110):
            (last,) = followed.put(f"k{number}=1")
            await reaches(follower, last)
    names = [actions[0]["commitInfo"]["operation"] for actions in log(followed.table)]
    assert "OPTIMIZE" in names
    found = sequences(followed.table)
    assert found[names.index("OPTIMIZE")] is None
    assert found[-1] == 110


async def test_restart_after_checkpoint_continues(followed: Followed) -> None:
    followed.put("a=1", "b=1")
    await followed.once()
    DeltaTable(followed.table).create_checkpoint()
    followed.put("c=1")
    assert (await followed.once()).rows == 1


async def test_damaged_entry_of_position_is_named(followed: Followed) -> None:
    followed.put("a=1")
    await followed.once()
    DeltaTable(followed.table).create_checkpoint()
    entry = followed.table / "_delta_log" / f"{version(followed.table):020}.json"
    entry.write_text("{")
    with pytest.raises(TableError, match=f"{entry.name} is damaged"):
        await followed.once()


@pytest.mark.parametrize("arguments", [{}, {"deletes": "mark"}, {"history": True}])
@of_bucket(history=5)
async def test_start_without_position_removes_rows_that_bucket_lacks(
    followed: Followed, arguments: dict[str, Any]
) -> None:
    followed.put("a=1", "b=1", "c=1")
    await followed.once(**arguments)
    before = version(followed.table)
    followed.put("a=2")
    # As if the position had been lost: RESTORE makes it void.
    await followed.once(**arguments)
    DeltaTable(followed.table).restore(before)
    buckets.api(followed.url, "STREAM.PURGE.KV_fleet", {"filter": "$KV.fleet.b"})
    progress = await followed.once(**arguments)
    found = rows(followed.table)
    live = [row for row in found if not row.get("deleted") and row.get("__END_AT") is None]
    assert {row["key"]: row["value"] for row in live} == {"a": b"2", "c": b"1"}
    assert progress.keys == len(found)


@of_bucket(max_age=86_400 * 10**9)
async def test_row_of_key_removed_without_marker_is_removed_by_reconcile(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    followed.put("a=1", "b=1")
    await followed.once()
    buckets.api(followed.url, "STREAM.PURGE.KV_fleet", {"filter": "$KV.fleet.b"})
    with caplog.at_level("WARNING"):
        await followed.once()
    assert "keys can be removed without a marker" in caplog.text
    assert values(followed.table) == {"a": b"1", "b": b"1"}
    progress = await followed.once(reconcile=True)
    assert (values(followed.table), progress.rows) == ({"a": b"1"}, 0)


async def test_start_without_position_keeps_rows_of_other_keys(followed: Followed) -> None:
    followed.put("a=1", "b.x=1", "b.y=1")
    await followed.once()
    for entry in (followed.table / "_delta_log").glob("*.json"):  # as if Spark had followed all
        lines = [line for line in entry.read_text().splitlines() if '"txn"' not in line]
        entry.write_text("\n".join(lines))
    buckets.api(followed.url, "STREAM.PURGE.KV_fleet", {"filter": "$KV.fleet.>"})
    await followed.once(keys="b.*")
    assert set(values(followed.table)) == {"a"}


async def test_restore_by_another_writer_is_undone(followed: Followed) -> None:
    followed.put("a=1")
    async with followed.following() as follower:
        (last,) = followed.put("a=2")
        await reaches(follower, last)
        DeltaTable(followed.table).restore(1)
        await wait_until_async(lambda: values(followed.table) == {"a": b"2"}, "the row is back")
        DeltaTable(followed.table).restore(1)
        (last,) = followed.put("b=1")
        await reaches(follower, last)
        assert values(followed.table) == {"a": b"2", "b": b"1"}


async def test_table_created_again_gets_all_rows(followed: Followed) -> None:
    followed.put("a=1", "b=1")
    async with followed.following() as follower:
        shutil.rmtree(followed.table)
        (last,) = followed.put("c=1")
        await reaches(follower, last)
        assert set(values(followed.table)) == {"a", "b", "c"}


async def test_two_followers_make_one_table(followed: Followed) -> None:
    async with followed.following() as one, followed.following() as other:
        for number in range(30):
            (last,) = followed.put(f"k{number % 7}={number}")
        await reaches(one, last)
        await reaches(other, last)
    expected = {f"k{n % 7}": b"%d" % n for n in range(30)}
    assert values(followed.table) == expected
    assert max(at for at in sequences(followed.table) if at is not None) == 30


@pytest.mark.parametrize("followed_before", [True, False], ids=["behind", "without position"])
async def test_deleted_key_stays_deleted_beside_other_follower(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, followed_before: bool
) -> None:
    if followed_before:
        await followed.once()
    followed.put("k=1")

    def delete_and_follow() -> None:
        followed.delete("k")
        asyncio.run(followed.once())

    with before_next(monkeypatch, "merge", delete_and_follow):
        await followed.once()
    assert values(followed.table) == {}


async def test_position_of_another_follower_committed_during_start_is_continued(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.put("a=1")
    await followed.once()

    def put_and_follow() -> None:
        followed.put("b=1")
        assert asyncio.run(followed.once()).rows == 1

    with before_next(monkeypatch, "open", put_and_follow):
        assert (await followed.once()).rows == 0
    assert values(followed.table) == {"a": b"1", "b": b"1"}


async def test_long_interval_ends_with_stop(followed: Followed) -> None:
    async with followed.following(commit_interval=600) as follower:
        (last,) = followed.put("a=1")
        await asyncio.sleep(0.5)
        assert follower.progress.revision < last
    assert (await followed.once()).caught_up
    assert set(values(followed.table)) == {"a"}


async def test_start_option_with_void_position_is_refused(followed: Followed) -> None:
    followed.put("a=1")
    await followed.once(updatesOnly="true")
    followed.put("b=1")
    await followed.once(updatesOnly="true")
    DeltaTable(followed.table).restore(1)
    with pytest.raises(ConfigurationError, match="position is void"):
        await followed.once(updatesOnly="true")


async def test_once_ends_at_its_target_under_writes(followed: Followed) -> None:
    followed.put(*(f"k{number}=1" for number in range(50)))
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            followed.put(*(f"k{number}=2" for number in range(50)))

    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write)
        try:
            assert (await followed.once()).rows >= 50
        finally:
            stop.set()
            writing.result()


async def test_recreated_bucket_is_data_loss_or_replaces_rows(followed: Followed) -> None:
    followed.put("a=1", "b=1")
    await followed.once()
    buckets.delete_bucket(followed.url, "fleet")
    followed.create()
    followed.put("b=2")
    with pytest.raises(DataLossError, match="re-created"):
        await followed.once()
    await followed.once(failOnDataLoss="false")
    assert values(followed.table) == {"b": b"2"}
    assert (await followed.once()).rows == 0


@of_bucket(history=5)
async def test_history_that_aged_out_is_data_loss(followed: Followed) -> None:
    followed.put("a=1")
    await followed.once(history=True)
    followed.put("a=2", "a=3", "b=1")
    buckets.api(followed.url, "STREAM.PURGE.KV_fleet", {"seq": 4})
    with pytest.raises(DataLossError, match=r"aged out.*follow into a new table"):
        await followed.once(history=True)
    await followed.once(history=True, failOnDataLoss="false")
    assert [row["value"] for row in rows(followed.table)] == [b"1", b"1"]


async def test_consumer_deleted_after_stop(followed: Followed) -> None:
    async with followed.following():
        await wait_until_async(lambda: buckets.consumers(followed.url, "fleet"), "it reads")
    assert buckets.consumers(followed.url, "fleet") == []


# -- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"keys": "a"}, {"metaOnly": True}])
async def test_position_of_other_rows_is_refused(
    followed: Followed, options: dict[str, Any]
) -> None:
    await followed.once()
    with pytest.raises(ConfigurationError, match="other keys, codecs, history or"):
        await followed.once(**options)


async def test_table_that_drops_positions_is_refused(followed: Followed) -> None:
    await followed.once()
    table = DeltaTable(followed.table)
    table.alter.set_table_properties(
        {"delta.setTransactionRetentionDuration": "interval 1 day"}, raise_if_not_exists=False
    )
    with pytest.raises(ConfigurationError, match="setTransactionRetentionDuration"):
        await followed.once()


async def test_table_made_append_only_while_follower_is_idle_is_refused(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.put("a=1")

    def change() -> None:
        DeltaTable(followed.table).alter.set_table_properties({"delta.appendOnly": "true"})

    follower = followed.follower()
    task = asyncio.ensure_future(follower.run())
    await reaches(follower, 1, task)
    before = version(followed.table)
    with before_next(monkeypatch, "refresh", change):
        await wait_until_async(lambda: version(followed.table) > before, "the property")
    followed.put("b=1")
    with pytest.raises(ConfigurationError, match=r"append-only.*; unset it"):
        await asyncio.wait_for(task, 30)
    assert version(followed.table) == before + 1
    assert values(followed.table) == {"a": b"1"}


@pytest.mark.parametrize("name", sorted(follower._NOT_OF_A_FOLLOWER))
def test_option_of_queries_only_is_refused(followed: Followed, name: str) -> None:
    with pytest.raises(OptionError, match=f"option '{name}' is not one of a follower"):
        followed.follower(**{name.upper(): "x"})


async def test_absent_bucket_is_refused_before_table_exists(followed: Followed) -> None:
    buckets.delete_bucket(followed.url, "fleet")
    with pytest.raises(BucketNotFoundError):
        await followed.once()
    assert not followed.table.exists()


async def test_bucket_deleted_while_follower_runs_is_named(followed: Followed) -> None:
    follower = followed.follower()
    task = asyncio.ensure_future(follower.run())
    await wait_until_async(lambda: follower.progress.caught_up, "the follower reads")
    buckets.delete_bucket(followed.url, "fleet")
    with pytest.raises(BucketNotFoundError, match="bucket 'fleet' does not exist"):
        await asyncio.wait_for(task, 30)


async def test_wrong_domain_ends_start_within_connect_timeout(followed: Followed) -> None:
    with pytest.raises(JetStreamNotEnabledError, match="'domain'"):
        await followed.once(domain="other", connectTimeout=1)


@of_bucket(retention="workqueue")
async def test_work_queue_is_refused(followed: Followed) -> None:
    with pytest.raises(UnsupportedStreamError):
        await followed.once()


def by_spark(spark: SparkSession, followed: Followed, checkpoint: Path, **arguments: Any) -> None:
    """Let a query of Spark read what the bucket has."""
    source = spark.readStream.format("nats_kv").options(servers=followed.url, bucket="fleet")
    if "stored_as_scd_type" in arguments:
        source = source.option("includeHistory", "true")
    query = follow(
        source.load(),
        followed.table,
        checkpoint=checkpoint,
        once=True,
        engine="driver",
        **arguments,
    )
    assert query.awaitTermination(120)


@of_bucket(history=5)
async def test_table_is_continued_by_either_way(
    spark: SparkSession, followed: Followed, tmp_path: Path
) -> None:
    followed.put("a=1", "b=1")
    await followed.once()
    followed.put("a=2")
    by_spark(spark, followed, tmp_path / "checkpoint")
    assert [row["value"] for row in rows(followed.table)] == [b"2", b"1"]
    followed.delete("b")
    followed.put("c=1")
    assert (await followed.once()).rows == 3  # what the query has read is merged again
    by_spark(spark, followed, tmp_path / "checkpoint")
    assert [(row["key"], row["value"]) for row in rows(followed.table)] == [
        ("a", b"2"),
        ("c", b"1"),
    ]


@of_bucket(history=5)
async def test_revisions_that_spark_has_read_are_not_required_again(
    spark: SparkSession, followed: Followed, tmp_path: Path
) -> None:
    """The follower's position is older than what a query has merged meanwhile."""
    followed.put("a=1")
    await followed.once(history=True)
    followed.put("a=2", "a=3")
    by_spark(spark, followed, tmp_path / "checkpoint", stored_as_scd_type=2)
    versions = rows(followed.table)
    followed.put("b=1")
    buckets.api(followed.url, "STREAM.PURGE.KV_fleet", {"seq": 4})
    await followed.once(history=True)
    assert rows(followed.table)[: len(versions)] == versions
    followed.put("b=2", "b=3")
    buckets.api(followed.url, "STREAM.PURGE.KV_fleet", {"seq": 6})
    with pytest.raises(DataLossError):
        await followed.once(history=True)


@of_bucket(history=5)
async def test_table_of_spark_is_taken_over_without_position(
    spark: SparkSession, followed: Followed, tmp_path: Path
) -> None:
    followed.put("a=1", "b=1")
    by_spark(spark, followed, tmp_path / "checkpoint")
    buckets.api(followed.url, "STREAM.PURGE.KV_fleet", {"filter": "$KV.fleet.a"})
    followed.put("c=1")
    await followed.once()
    assert [row["key"] for row in rows(followed.table)] == ["b", "c"]
