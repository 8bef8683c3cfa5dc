"""Every way to watch a bucket, also from another account or domain: rows, order, initial values."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import Row

from tests.support.nats.buckets import (
    api,
    bucket_info,
    consumers,
    create_bucket,
    delete,
    fill_bucket,
    purge,
    put,
    put_many,
)
from tests.support.nats.topology import (
    ADR19_API_PREFIX,
    ADR19_INBOX_PREFIX,
    adr19_server,
    hub_and_leaf,
)
from tests.support.query_driver.driver import new_query
from tests.support.spark.scenario import (
    Create,
    Delete,
    Do,
    ExpectBatches,
    ExpectInitialThrough,
    ExpectNoConsumers,
    ExpectRows,
    Purge,
    Put,
    PutMany,
    Run,
    Scene,
    Start,
    Stop,
    Wait,
    play,
    read,
    shown,
)

# Revisions:   1 a=1   2 b=1   3 a=2   4 DEL c   5 PURGE b (takes 2 away)
LAST_VALUES = ("3 PUT a=2 initial", "4 DEL c initial", "5 PURGE b initial")
ALL_REVISIONS = ("1 PUT a=1 initial", *LAST_VALUES)
CHANGES = ("6 PUT a=3", "7 DEL a", "8 PUT d=1")
# What a later read of the changes finds where only one revision of a key is kept.
COMPACTED = ("7 DEL a", "8 PUT d=1")


def test_format_is_found_by_its_module(scene: Scene) -> None:
    """A new session lacks what others have registered."""
    fresh = replace(scene, spark=scene.spark.newSession())
    assert [field.simpleString() for field in read(fresh, {}).schema.fields] == [
        "bucket:string",
        "key:string",
        "value:binary",
        "revision:bigint",
        "created:timestamp",
        "operation:string",
        "delta:bigint",
        "initial:boolean",
        "stream_created:timestamp",
    ]


def test_last_values_then_changes(scene: Scene) -> None:
    play(
        scene,
        Create(),
        *(Put("a", "1"), Put("b", "1"), Put("a", "2"), Delete("c"), Purge("b")),
        Start(),
        Wait(rows=3),
        ExpectRows(*LAST_VALUES),
        Put("a", "3"),
        Wait(rows=4),
        *(Delete("a"), Put("d", "1")),
        Wait(rows=6),
        ExpectRows(*LAST_VALUES, *CHANGES),
        ExpectInitialThrough(5),
        Stop(),
        ExpectNoConsumers(),
    )


# Options of a bucket with this history, the rows of a query, those after its restart.
FEWER = ("6 PUT a=3", "8 PUT d=1")
WITHOUT_VALUES = ("3 PUT a initial", "4 DEL c initial", "5 PURGE b initial")
WATCHES: dict[str, tuple[int, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "last values of history": (5, {}, LAST_VALUES, CHANGES),
    "last values of unlimited history": (-1, {}, LAST_VALUES, CHANGES),
    "full history": (5, {"includeHistory": True}, ALL_REVISIONS, CHANGES),
    "history of one": (1, {"includeHistory": True}, LAST_VALUES, COMPACTED),
    "updates only": (5, {"updatesOnly": True}, (), CHANGES),
    "updates only, one revision": (1, {"updatesOnly": True}, (), COMPACTED),
    "deletes ignored": (5, {"ignoreDeletes": True}, LAST_VALUES[:1], FEWER),
    "deletes ignored, full history": (
        *(5, {"ignoreDeletes": True, "includeHistory": True}),
        *(ALL_REVISIONS[:2], FEWER),
    ),
    "values left out": (5, {"metaOnly": True}, WITHOUT_VALUES, ("6 PUT a", "7 DEL a", "8 PUT d")),
    "from a sequence": (5, {"startSequence": 3}, LAST_VALUES, CHANGES),
    "from ahead": (5, {"startSequence": 7}, (), COMPACTED),
}


@pytest.mark.parametrize(("history", "options", "first", "then"), WATCHES.values(), ids=WATCHES)
def test_watch(
    url: str,
    name: str,
    history: int,
    options: dict[str, Any],
    first: tuple[str, ...],
    then: tuple[str, ...],
) -> None:
    fill_bucket(url, name, [("a", b"1"), ("b", b"1"), ("a", b"2")], history)
    delete(url, name, "c")
    purge(url, name, "b")
    with new_query(url, bucket=name, **options) as query:
        assert [shown(Row(**row)) for row in query.read_new()] == [*first]
    put(url, name, "a", b"3")
    delete(url, name, "a")
    put(url, name, "d", b"1")
    with new_query(url, offset=query.offset, bucket=name, **options) as query:
        assert [shown(Row(**row)) for row in query.read_new()] == [*then]
    assert query.offset["initial_through"] == (6 if options == {"startSequence": 7} else 5)
    assert consumers(url, name) == []


@pytest.mark.parametrize("history", [1, 5])
@pytest.mark.parametrize("options", [{}, {"includeHistory": True}, {"updatesOnly": True}], ids=str)
def test_empty_bucket(url: str, name: str, history: int, options: dict[str, bool]) -> None:
    create_bucket(url, name, history)
    with new_query(url, bucket=name, **options) as query:
        assert query.read_new() == []
        put_many(url, name, [("a", b"1"), ("b", b"1")])
        found = [(row["revision"], row["initial"]) for row in query.read_new()]
        assert found == [(1, False), (2, False)]
        assert query.offset["initial_through"] == 0


def test_micro_batch_waits_for_rows(scene: Scene) -> None:
    """Spark passes the minimum back to the source; ``planning/test_planner.py`` has the rule."""
    options = {"includeHistory": True, "minRowsPerTrigger": 10}
    play(
        scene,
        Create(64),
        Put("a", "0"),
        Start(options),
        Wait(rows=1),
        PutMany(9, keys=1),
        Do(lambda _: time.sleep(1.5)),  # Spark polls many times
        ExpectBatches((1,)),
        PutMany(1, keys=1),
        Wait(rows=11),
        Stop(),
        Put("a", "10"),
        Run(options),
        ExpectBatches((1, 10, 1)),
    )


def test_rows_are_complete(scene: Scene) -> None:
    """Each column of each row against the server's own record of the message."""
    key = "A-z_0/9=.k"
    play(
        scene,
        Create(),
        Put(key, "text"),
        Put("empty", b""),
        Put("binary", bytes(range(256))),
        Put("lines", b"\r\nMSG a 1 3\r\nabc\r\n"),
        Put("large", b"x" * 300_000),
        Put("ключ", b"1"),  # not a key by ADR-8, but servers take it and other clients write it
        Put("with.headers", b"1", {"Trace": "t1", "Status": "404"}),
        Put("unknown.operation", b"1", {"KV-Operation": "MOVE"}),
        Put("marker.with.value", b"1", {"KV-Operation": "DEL"}),
        Delete("gone"),
        Purge("purged"),
        Run(),
    )
    operations = ["PUT"] * 8 + ["DEL", "DEL", "PURGE"]
    stored = [message(scene, revision) for revision in range(1, 12)]
    created = microseconds(bucket_info(scene.url, scene.bucket)["created"])
    assert [row.asDict() for row in scene.rows] == [
        {
            "bucket": scene.bucket,
            "key": one["subject"].removeprefix(f"$KV.{scene.bucket}."),
            "value": base64.b64decode(one.get("data", "")) if operation == "PUT" else None,
            "revision": one["seq"],
            "created": microseconds(one["time"]),
            "operation": operation,
            "delta": 11 - one["seq"],
            "initial": True,
            "stream_created": created,
        }
        for one, operation in zip(stored, operations, strict=True)
    ]
    assert scene.rows[0].key == key
    assert len(scene.rows[4].value) == 300_000


def message(scene: Scene, revision: int) -> dict[str, Any]:
    answer = api(scene.url, f"STREAM.MSG.GET.KV_{scene.bucket}", {"seq": revision})
    return dict(answer["message"])


def microseconds(text: str) -> datetime:
    """A server's time, floored to microseconds, as ``collect()`` gives it in a UTC session."""
    seconds, _, fraction = text.removesuffix("Z").partition(".")
    return datetime.fromisoformat(seconds) + timedelta(microseconds=int(fraction[:6].ljust(6, "0")))


@contextlib.contextmanager
def imported() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Account I, as in the document: neither flow control nor a second response arrives.

    Yields the addresses of the bucket's owner and of a query from elsewhere, and its options.
    """
    with adr19_server() as accounts:
        user = {"user": "i", "password": "i"}
        prefixes = {"apiPrefix": ADR19_API_PREFIX, "inboxPrefix": ADR19_INBOX_PREFIX}
        yield accounts.exporter, accounts.server.url, {**user, **prefixes}


@contextlib.contextmanager
def in_domain() -> Iterator[tuple[str, str, dict[str, str]]]:
    """A leaf node's client reads what the hub has."""
    with hub_and_leaf() as both:
        yield both.hub.url, both.leaf.url, {"domain": "hub"}


@pytest.mark.parametrize("place", [imported, in_domain])
def test_query_through_prefix(place: Any) -> None:
    with place() as (owner, url, options):
        fill_bucket(owner, "map", [("a", b"1"), ("x", b"1"), ("b", b"1"), ("a", b"2")], 5)
        # A filter and a limit, so that the planner ranks: its requests take the prefix too.
        given = {"bucket": "map", "keys": "a,b,c", "includeHistory": True, "maxRowsPerTrigger": 2}
        with new_query(url, **given, **options) as query:
            assert [row["revision"] for row in query.read_new()] == [1, 3, 4]
            put_many(owner, "map", [("c", b"1"), ("x", b"2"), ("a", b"3")])
            assert [row["revision"] for row in query.read_new()] == [5, 7]
        assert consumers(owner, "map") == []
