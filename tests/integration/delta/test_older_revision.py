"""``reconcile`` after a revision expired and an older one of its key is current again."""

from __future__ import annotations

import asyncio
import base64
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

from nats_stream_source.delta import ReconcileResult
from nats_stream_source.delta.tables import Engine
from nats_stream_source.embedded import NatsServer
from tests.integration.delta.kv_bucket import Bucket, Reconciled
from tests.integration.delta.merge_model import Entry, Frame, Merge, by_driver
from tests.integration.delta.table_content import live, stored, version
from tests.support.wait import wait_until

pytestmark = pytest.mark.delta
_SPARK = pytest.mark.faults
REMOVE, MARK, HISTORY = {"deletes": "remove"}, {"deletes": "mark"}, {"stored_as_scd_type": 2}
kinds = pytest.mark.parametrize("kind", [REMOVE, MARK, HISTORY], ids=["remove", "mark", "history"])

Expired = Callable[..., list[Entry]]


@pytest.fixture
def bucket(shared_server: NatsServer, request: pytest.FixtureRequest) -> Bucket:
    """Bucket that allows TTLs and keeps three revisions of a key."""
    name = re.sub(r"\W", "_", request.node.name)
    return Bucket(shared_server.url, name).create(allow_msg_ttl=True)


@pytest.fixture
def expired(bucket: Bucket, frame: Frame, table: Path, merge: Merge) -> Expired:
    """Function that merges an entry of each key and a newer one, which expires.

    Returns:
        The entries that are current again.
    """

    def write(*keys: str, old: bytes = b"old", **kind: Any) -> list[Entry]:
        puts = [(key, "PUT") for key in keys]
        older = bucket.write(*puts, value=old, headers={"unit": "kWh"})
        newer = bucket.write(*puts, value=b"short", headers={"Nats-TTL": "1s"})
        merge(frame(*older, *newer), str(table), **kind)
        wait_until(lambda: bucket.state()["messages"] == len(keys), "the entries expire")
        return older

    return write


def modes(kind: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``reconcile`` for a kind of table."""
    return {name: value for name, value in kind.items() if name == "deletes"}


def versions(table: Path) -> list[tuple[Any, ...]]:
    """Return key, value and the revisions that start and end each version."""
    return sorted(
        (
            row["key"],
            row["value"],
            row["__START_AT"]["revision"],
            row["__END_AT"] and row["__END_AT"]["revision"],
        )
        for row in stored(table)
    )


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("driver", REMOVE),
        ("driver", MARK),
        ("spark", MARK),
        pytest.param("spark", REMOVE, marks=_SPARK),
    ],
    ids=["driver-remove", "driver-mark", "spark-mark", "spark-remove"],
    indirect=["engine"],
)
def test_row_gets_older_value(
    kind: dict[str, Any],
    expired: Expired,
    bucket: Bucket,
    table: Path,
    frame: Frame,
    merge: Merge,
    reconciled: Reconciled,
) -> None:
    older = expired("k", "l", **kind)
    merge(frame(*bucket.write(("l", "PUT"))), str(table), **kind)
    assert [row["value"] for row in stored(table)] == [b"short", b"x"]
    assert reconciled(**kind) == ReconcileResult(0, 1, 0, last_seq=5, replaced=1)
    row = stored(table)[0]
    assert (row["value"], row["revision"], row["operation"]) == (b"old", 1, "PUT")
    assert row["created"] == bucket.created(1)
    before = version(table)
    assert reconciled(**kind) == ReconcileResult(0, 2, 0, last_seq=5)
    assert version(table) == before
    merge(frame(older[0], *bucket.write(("k", "PUT"))), str(table), **kind)
    assert live(table) == {"k": 6, "l": 5}


@pytest.mark.parametrize("engine", ["driver", pytest.param("spark", marks=_SPARK)], indirect=True)
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
    bucket: Bucket,
    table: Path,
    frame: Frame,
    merge: Merge,
    reconciled: Reconciled,
) -> None:
    """The versions end after the stream's last message, and the next one gets that sequence."""
    older = expired("k", **HISTORY)
    closed = [("k", b"old", 1, 2), ("k", b"short", 2, 3)]
    assert reconciled() == ReconcileResult(0, 0, 0, last_seq=2, replaced=1)
    assert versions(table) == sorted([*closed, ("k", b"old", 3, None)])
    (opened,) = (row for row in stored(table) if row["__END_AT"] is None)
    assert (opened["revision"], opened["created"]) == (1, bucket.created(1))
    before = version(table)
    assert reconciled() == ReconcileResult(0, 1, 0, last_seq=2)
    assert version(table) == before
    if following is None:
        bucket.purge_subjects("k")
        assert reconciled() == ReconcileResult(1, 0, 0, last_seq=2)
        assert versions(table) == closed
        following, expected = ("k", "PUT"), [("k", b"x", 3, None)]
    batch = frame(*older, *bucket.write(following))
    for _repeat in range(2):
        merge(batch, str(table), **HISTORY)
        assert versions(table) == sorted([*closed, *expected])


@by_driver
def test_history_keeps_version_of_last_message(
    bucket: Bucket, table: Path, frame: Frame, merge: Merge, reconciled: Reconciled
) -> None:
    merge(frame(*bucket.write(("k", "PUT"))), str(table), **HISTORY)
    bucket.purge_subjects("k")
    assert reconciled() == ReconcileResult(1, 0, 0, last_seq=1)
    assert versions(table) == [("k", b"x", 1, 2)]
    merge(frame(*bucket.write(("k", "PUT"), value=b"y")), str(table), **HISTORY)
    assert versions(table) == [("k", b"x", 1, 2), ("k", b"y", 2, None)]


@kinds
@by_driver
def test_newer_put_wins_beside_query(
    kind: dict[str, Any],
    expired: Expired,
    bucket: Bucket,
    table: Path,
    frame: Frame,
    merge: Merge,
    reconciled: Reconciled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A query merges a new value of a key after the leader reported the older one."""
    expired("k", "l", **kind)
    module = importlib.import_module("nats_stream_source.delta.compare_with_bucket")
    compare = module.find_differences

    async def compare_then_merge(*arguments: Any) -> Any:
        outcome = await compare(*arguments)
        await asyncio.to_thread(
            lambda: merge(frame(*bucket.write(("k", "PUT"))), str(table), **kind)
        )
        return outcome

    monkeypatch.setattr(module, "find_differences", compare_then_merge)
    assert reconciled(**modes(kind)) == ReconcileResult(0, 0, 1, last_seq=4, replaced=1)
    if kind is HISTORY:
        expected = [("k", b"old", 1, 3), ("k", b"short", 3, 5), ("k", b"x", 5, None)]
        assert versions(table)[:3] == expected
    else:
        assert live(table) == {"k": 5, "l": 2}


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
    merge_batch, calls = Engine.merge, []

    def fail_at_second(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return merge_batch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "merge", fail_at_second)
        with pytest.raises(KeyboardInterrupt):
            reconciled(**modes(kind))
    assert len(calls) == 2
    assert reconciled(**modes(kind)) == ReconcileResult(0, 0, 0, last_seq=4, replaced=1)
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
    bucket: Bucket,
    table: Path,
    frame: Frame,
    merge: Merge,
    reconciled: Reconciled,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def parsed(*arguments: Any, **named: Any) -> None:
        rows, *others = arguments
        merge(rows.withColumn("text", F.col("value").cast("string")), *others, **named)

    older = bucket.write(("k", "PUT"), value=b"old")
    newer = bucket.write(("k", "PUT"), value=b"short", headers={"Nats-TTL": "1s"})
    parsed(frame(*older, *newer), str(table), **kind)
    wait_until(lambda: bucket.state()["messages"] == 1, "the entry expires")
    before = stored(table)
    assert reconciled(**modes(kind)) == ReconcileResult(0, 1, 0, last_seq=2)
    assert stored(table) == before
    (record,) = (one for one in caplog.records if "older value is unknown" in one.message)
    assert "rows=1" in record.message
