"""A bucket as it was: equal to a model at every revision, or an error where the server lacks it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Timer
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError, OptionError
from nats_stream_source.jetstream.ordered import reader as ordered_reader
from nats_stream_source.jetstream.ordered.reader import small_range
from nats_stream_source.spark.reading import as_of
from tests.support.nats.buckets import (
    api,
    bucket_info,
    bucket_state,
    create_bucket,
    delete,
    fill_bucket,
    publish,
    purge,
    put,
    put_many,
    with_client,
)
from tests.support.query_driver.batch import Row, planned_batch, read_batch, skip_catch_up
from tests.support.wait import wait_until

Entry = tuple[str, str, int]  # key, operation, revision


@dataclass
class Model:
    """A bucket with a history: what was ever written, and what is left of it."""

    history: int
    log: list[Entry] = field(default_factory=list)
    left: dict[str, list[Entry]] = field(default_factory=dict)

    def write(self, key: str, operation: str) -> None:
        entry = (key, operation, len(self.log) + 1)
        self.log.append(entry)
        kept = [] if operation == "PURGE" else self.left.get(key, [])
        self.left[key] = [*kept, entry][-self.history :]

    def truth(self, revision: int) -> dict[str, Entry]:
        return {entry[0]: entry for entry in self.log[:revision]}

    def known(self, revision: int) -> tuple[dict[str, Entry], set[str]]:
        """The state at a revision by the remaining revisions, and the keys of unknown state."""
        state, unknown = {}, set()
        left = [entry for entries in self.left.values() for entry in entries]
        whole = sum(entry[2] <= revision for entry in left) == revision
        for key, entries in self.left.items():
            then = [entry for entry in entries if entry[2] <= revision]
            if then:
                state[key] = then[-1]
            elif not whole and (len(entries) == self.history or entries[0][1] == "PURGE"):
                unknown.add(key)
        return state, unknown


def as_entries(rows: list[Row]) -> dict[str, Entry]:
    found = {row["key"]: (row["key"], row["operation"], row["revision"]) for row in rows}
    assert len(found) == len(rows)  # one row a key
    return found


@pytest.fixture(params=[True, False], ids=["pauses", "no pauses"])
def pauses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether writers let the reader catch up, or are too fast for it."""
    if not request.param:
        skip_catch_up(monkeypatch)


@pytest.mark.parametrize("history", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("seed", "pauses"), [(0, True), (1, True), (2, False)], indirect=["pauses"]
)
@pytest.mark.usefixtures("pauses")
def test_rows_equal_model_at_every_revision(
    url: str,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    history: int,
    seed: int,
) -> None:
    if seed:  # the revisions that wait are reduced to one a key before the end
        monkeypatch.setattr(as_of, "_MAX_ROWS", 3)
    chance, model = random.Random(100 * history + seed), Model(history)
    create_bucket(url, bucket, history)
    messages = []
    for _ in range(24):
        key = chance.choice("aabbbccdefgh")
        operation = chance.choice(["PUT"] * 6 + ["DEL", "PURGE"])
        model.write(key, operation)
        headers = {"DEL": {"KV-Operation": "DEL"}, "PUT": None}.get(
            operation, {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}
        )
        messages.append((f"$KV.{bucket}.{key}", b"v%d" % len(model.log), headers))
    publish(url, messages)
    refused = 0
    for revision in range(1, len(model.log) + 1):
        state, unknown = model.known(revision)
        options = {"bucket": bucket, "asOfSequence": revision}
        if unknown:
            with pytest.raises(DataLossError) as caught:
                read_batch(url, **options)
            assert all(repr(key) in str(caught.value) for key in unknown)
        else:
            assert state == model.truth(revision)  # the model itself
            assert as_entries(read_batch(url, **options)) == state
        assert as_entries(read_batch(url, **options, failOnDataLoss=False)) == state
        refused += bool(unknown)
    assert refused < len(model.log)
    assert refused or history > 3


# -- what happens while it is read ----------------------------------------------------------------


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("history", [1, 2])
def test_keys_that_are_overwritten_between_plan_and_read(
    url: str, bucket: str, history: int
) -> None:
    fill_bucket(url, bucket, [(key, b"1") for key in "abc"], history)
    for accepted in (False, True):
        read = planned_batch(url, bucket=bucket, asOfSequence=3, failOnDataLoss=not accepted)
        put_many(url, bucket, [("b", b"2")] * history)
        if accepted:
            assert [row["key"] for row in read()] == ["a", "c"]
            continue
        with pytest.raises(DataLossError, match=r"of 1 keys \('b'\).*failOnDataLoss=false"):
            list(read())


@pytest.mark.parametrize("operation", [put, purge])
def test_keys_that_are_overwritten_between_two_readings(
    url: str,
    bucket: str,
    operation: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first reading finds the entry, the second one does not."""
    fill_bucket(url, bucket, [(key, b"1") for key in "aabbcc"], 2)
    choose = as_of._LastSequences.finish

    def meanwhile(last: as_of._LastSequences) -> None:
        choose(last)
        if operation is put:
            put_many(url, bucket, [("b", b"2")] * 2)
        else:
            purge(url, bucket, "b")

    monkeypatch.setattr(as_of._LastSequences, "finish", meanwhile)
    with pytest.raises(DataLossError, match=r"of 1 keys \('b'\)"):
        read_batch(url, bucket=bucket, asOfSequence=6)
    # An entry that came again is none the worse for what was written since: `c` has a later one.
    rows = read_batch(url, bucket=bucket, asOfSequence=6, failOnDataLoss=False)
    assert [row["revision"] for row in rows] == [2, 6]


@pytest.mark.parametrize("history", [2, 5])
def test_keys_that_are_made_while_later_ones_are_read(
    url: str, bucket: str, monkeypatch: pytest.MonkeyPatch, history: int
) -> None:
    """Two ranges are read after the first, and then each new key is requested from the leader."""
    fill_bucket(url, bucket, [("z", b"")] * 6 + [("a", b"1"), ("a", b"2"), ("b", b"1")], history)
    read = planned_batch(url, bucket=bucket, asOfSequence=9)
    put_many(url, bucket, [("a", b"3"), ("c", b"1"), ("c", b"2"), ("c", b"3")])
    looks: list[int] = []

    async def then_written(*args: Any) -> Any:
        looks.append(len(looks))
        if len(looks) == 2:
            await asyncio.to_thread(put, url, bucket, "d", b"1")
        return await small_range(*args)

    monkeypatch.setattr(ordered_reader, "small_range", then_written)
    if history == 2:
        # It may have had more revisions, and one of them in time.
        with pytest.raises(DataLossError, match=r"of 1 keys \('c'\)"):
            list(read())
    else:
        assert [row["revision"] for row in read()] == [6, 8, 9]
        assert looks.pop() == 3  # after the values
    assert looks == [0, 1, 2]


def test_keys_undecidable_are_named_by_first(url: str, bucket: str) -> None:
    fill_bucket(url, bucket, [(f"k{i:02}", b"") for i in range(25)] * 2)
    with pytest.raises(DataLossError, match=r"of 25 keys \('k00'.*'k09' and 15 more\)"):
        read_batch(url, bucket=bucket, asOfSequence=25)
    assert read_batch(url, bucket=bucket, asOfSequence=25, failOnDataLoss=False) == []


# -- limits that leave no trace -------------------------------------------------------------------


def test_entry_older_than_age_limit(nats_server: NatsServer, bucket: str) -> None:
    url = nats_server.url
    create_bucket(url, bucket, 5, max_age=1_000_000_000, duplicate_window=1_000_000_000)
    put_many(url, bucket, [("old", b"1"), ("a", b"1")])
    wait_until(lambda: bucket_state(url, bucket)["messages"] == 0, "entries removed by age")
    put_many(url, bucket, [("b", b"1"), ("b", b"2")])
    with pytest.raises(DataLossError, match="without a trace \\(max_age\\)"):
        read_batch(url, bucket=bucket, asOfSequence=3)


def test_age_limit_not_reached(url: str, bucket: str) -> None:
    create_bucket(url, bucket, 2, max_age=3_600_000_000_000)
    put_many(url, bucket, [("a", b"1"), ("a", b"2"), ("a", b"3"), ("b", b"1")])
    assert bucket_state(url, bucket)["first_seq"] == 2
    assert [row["revision"] for row in read_batch(url, bucket=bucket, asOfSequence=3)] == [3]


@pytest.mark.parametrize("keys", [None, "*"])
@pytest.mark.parametrize("history", [1, 2])
def test_age_limit_reached_after_plan(
    nats_server: NatsServer, bucket: str, history: int, keys: str | None
) -> None:
    """Nothing is later than the point, and yet its entries age out before they are read."""
    url = nats_server.url
    fill_bucket(url, bucket, [("a", b"1"), ("b", b"1")], history, max_age=3_000_000_000)
    only = {"keys": keys} if keys else {}
    read = planned_batch(url, bucket=bucket, asOfSequence=2, **only)
    wait_until(lambda: bucket_state(url, bucket)["messages"] == 0, "both are gone")
    with pytest.raises(DataLossError, match=r"without a trace \(max_age\)"):
        list(read())


def test_bucket_full_has_dropped_revisions(url: str, bucket: str) -> None:
    fill_bucket(url, bucket, [(key, b"1") for key in "abcde"], 5, max_msgs=3, discard="old")
    with pytest.raises(DataLossError, match="without a trace \\(max_msgs\\)"):
        read_batch(url, bucket=bucket, asOfSequence=4)
    kept = read_batch(url, bucket=bucket, asOfSequence=4, failOnDataLoss=False)
    assert [row["key"] for row in kept] == ["c", "d"]
    # As of the last revision it is the present state, of which nothing is missing.
    assert [row["key"] for row in read_batch(url, bucket=bucket, asOfSequence=5)] == ["c", "d", "e"]


def test_bucket_created_by_nats_py(url: str, bucket: str) -> None:
    """It allows TTLs, used or not: no message has expired only where no sequence is missing."""
    with_client(url, lambda client: client.jetstream().create_key_value(bucket=bucket, history=2))
    assert bucket_info(url, bucket)["config"]["allow_msg_ttl"]
    put_many(url, bucket, [(key, b"1") for key in "abcdd"])
    put(url, bucket, "d", b"3")
    assert [row["key"] for row in read_batch(url, bucket=bucket, asOfSequence=3)] == ["a", "b", "c"]
    # A sequence is missing, and nothing shows whether a TTL or the history removed the message.
    advice = (
        r"without a trace \(allow_msg_ttl\); set failOnDataLoss=false if no writer .* nats-py's"
    )
    with pytest.raises(DataLossError, match=advice):
        read_batch(url, bucket=bucket, asOfSequence=5)


@pytest.mark.usefixtures("pauses")
def test_purged_key_is_not_called_superseded(url: str, bucket: str) -> None:
    fill_bucket(url, bucket, [(key, b"1") for key in "ab"], 5)
    purge(url, bucket, "a")
    put_many(url, bucket, [("b", b"2")] * 5)
    with pytest.raises(DataLossError) as caught:
        read_batch(url, bucket=bucket, asOfSequence=2)
    assert "of 1 keys ('b') were superseded by later revisions, of which" in str(caught.value)
    assert "of 1 keys ('a') were removed by a later purge or expiry" in str(caught.value)


# -- options --------------------------------------------------------------------------------------


def test_as_of_time(url: str, bucket: str) -> None:
    """Each entry is of the state of the very time that Spark shows for it."""
    create_bucket(url, bucket, 10)
    for i in range(6):
        put(url, bucket, "ab"[i % 2], b"%d" % i)
    history = read_batch(url, bucket=bucket, includeHistory=True)
    assert len({row["created"] for row in history}) == 6
    for row in history:
        rows = read_batch(url, bucket=bucket, asOfTime=row["created"].isoformat())
        assert max(found["revision"] for found in rows) == row["revision"]
        assert rows == read_batch(url, bucket=bucket, asOfSequence=row["revision"])
        before = (row["created"] - timedelta(microseconds=1)).isoformat()
        rows = read_batch(url, bucket=bucket, asOfTime=before)
        assert max((found["revision"] for found in rows), default=0) == row["revision"] - 1
    with pytest.raises(OptionError, match=r"'asOfTime'.*future"):
        read_batch(url, bucket=bucket, asOfTime="2999-01-01T00:00:00Z")


def test_revision_beyond_end(url: str, bucket: str) -> None:
    create_bucket(url, bucket, 2)
    put(url, bucket, "a", b"1")
    with pytest.raises(OptionError, match=r"'asOfSequence': 2 lies beyond.*minLastRevision=2"):
        read_batch(url, bucket=bucket, asOfSequence=2)
    # Own writes are waited for, others' too: it comes while the planner waits.
    timer = Timer(0.3, put, (url, bucket, "a", b"2"))
    timer.start()
    rows = read_batch(url, bucket=bucket, asOfSequence=2, minLastRevision=2)
    timer.join()
    assert [row["value"] for row in rows] == [b"2"]


def test_markers_values_and_keys(url: str, bucket: str) -> None:
    fill_bucket(url, bucket, [("a.1", b"1"), ("a.2", b"2"), ("b.1", b"3")], 5)
    delete(url, bucket, "a.2")
    put(url, bucket, "a.2", b"5")

    def read(**options: Any) -> list[tuple[Any, ...]]:
        rows = read_batch(url, bucket=bucket, asOfSequence=4, **options)
        assert all(row["initial"] for row in rows)
        return [(row["key"], row["operation"], row["value"]) for row in rows]

    everything = [("a.1", "PUT", b"1"), ("b.1", "PUT", b"3"), ("a.2", "DEL", None)]
    assert read() == everything
    assert read(ignoreDeletes=True) == everything[:2]
    assert read(keys="a.*") == [everything[0], everything[2]]
    assert read(keys="a.2,b.*") == everything[1:]
    assert read(metaOnly=True) == [(key, operation, None) for key, operation, _ in everything]
    assert read(keys="c") == []


def test_bucket_empty_or_emptied(url: str, bucket: str) -> None:
    fill_bucket(url, bucket, [("a", b"1"), ("a", b"2")], 2)
    api(url, f"STREAM.PURGE.KV_{bucket}")
    assert bucket_state(url, bucket)["last_seq"] == 2
    assert read_batch(url, bucket=bucket, asOfSequence=1) == []
