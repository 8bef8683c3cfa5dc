"""The streams of a query: found, listed, removed, deleted, created again."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest

from nats_stream_source.errors import (
    BucketNotFoundError,
    ConfigurationError,
    DataLossError,
    OffsetError,
    StreamNotFoundError,
    UnsupportedStreamError,
)
from nats_stream_source.rows.base import StreamView
from nats_stream_source.spark.planning.stream_states import StreamStates
from tests.support.nats.buckets import (
    create_bucket,
    delete_bucket,
    fill_bucket,
    publish,
    put,
    put_many,
)
from tests.support.nats.streams import create_stream
from tests.support.query_driver.driver import new_query, read_all

pytestmark = pytest.mark.servers

ACCEPT = {"failOnDataLoss": "false"}
SITES: dict[str, Any] = {"bucketPattern": "site-.*", "discoveryInterval": 1}


@pytest.fixture
def sites(url: str) -> str:
    """The address of a server with the buckets ``site-1`` (two entries) and ``site-2`` (one)."""
    for name, count in (("site-1", 2), ("site-2", 1)):
        fill_bucket(url, name, ((f"k{i}", b"v") for i in range(count)))
    return url


def test_pattern_finds_bucket_while_query_runs(
    sites: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nats_stream_source")
    with new_query(sites, **SITES) as query:
        assert query.read_sequences() == {"site-1": [1, 2], "site-2": [1]}
        create_bucket(sites, "site-3")
        create_bucket(sites, "other")
        put_many(sites, "site-3", [("a", b"v"), ("b", b"v")])
        put(sites, "other", "k", b"v")
        assert query.read_sequences() == {"site-3": [1, 2]}
        assert "stream found stream=KV_site-3" in caplog.text
        put(sites, "site-3", "a", b"w")
    with new_query(sites, offset=query.offset, **SITES) as restarted:
        fill_bucket(sites, "site-4", [("a", b"v")])
        assert restarted.read_sequences() == {"site-3": [3], "site-4": [1]}


@pytest.mark.parametrize("option", [{}, {"includeHistory": True}, {"updatesOnly": True}])
def test_bucket_created_after_start_is_read_from_its_first_entry(
    sites: str, option: dict[str, bool]
) -> None:
    with new_query(sites, **SITES, **option) as query:
        first = query.read_sequences()
        assert first == ({} if "updatesOnly" in option else {"site-1": [1, 2], "site-2": [1]})
        fill_bucket(sites, "site-3", [("a", b"v")])
        assert query.read_sequences() == {"site-3": [1]}


def test_bucket_that_is_added_to_list_begins_where_query_begins(sites: str) -> None:
    """``updatesOnly``: the entries that it had when the query started are not updates."""
    with new_query(sites, buckets="site-1", updatesOnly=True) as query:
        assert query.read_sequences() == {}
    with new_query(
        sites, offset=query.offset, buckets="site-1,site-2", updatesOnly=True
    ) as restarted:
        assert restarted.read_sequences() == {}
        put(sites, "site-2", "k", b"v")
        assert restarted.read_sequences() == {"site-2": [2]}


def test_bucket_that_is_removed_from_list(sites: str, caplog: pytest.LogCaptureFixture) -> None:
    with new_query(sites, buckets="site-1,site-2") as query:
        query.read_sequences()
    put(sites, "site-1", "k", b"not read")
    put(sites, "site-2", "k", b"v")
    with new_query(sites, offset=query.offset, buckets="site-2") as restarted:
        assert restarted.read_sequences() == {"site-2": [2]}
        assert restarted.positions == {"KV_site-2": 2}
    line = 'stream is not read any more stream=KV_site-1 option="buckets=site-2"'
    assert caplog.text.count(line) == 1


def test_deleted_bucket_is_data_loss_that_names_it(
    sites: str, caplog: pytest.LogCaptureFixture
) -> None:
    with new_query(sites, **SITES) as query:
        query.read_sequences()
        delete_bucket(sites, "site-1")
        with pytest.raises(DataLossError, match=r"KV_site-1.*was deleted.*revision 2"):
            query.read_sequences()
    with new_query(sites, offset=query.offset, **SITES, **ACCEPT) as accepting:
        assert accepting.read_sequences() == {}
        assert accepting.positions == {"KV_site-2": 1}
        assert caplog.text.count("was deleted") == 1
        fill_bucket(sites, "site-1", [("new", b"v")])
        assert accepting.read_sequences() == {"site-1": [1]}


def test_bucket_created_again_between_two_polls(sites: str) -> None:
    with new_query(sites, buckets="site-1,site-2") as query:
        query.read_sequences()
        delete_bucket(sites, "site-1")
        fill_bucket(sites, "site-1", [("new", b"v")])
        with pytest.raises(DataLossError, match=r"KV_site-1.*deleted and re-created"):
            query.read_sequences()
    with new_query(sites, offset=query.offset, buckets="site-1,site-2", **ACCEPT) as accepting:
        assert accepting.read_sequences() == {"site-1": [1]}
        assert accepting.offset is not None
        epochs = {name: at["epoch"] for name, at in accepting.offset["streams"].items()}
        assert epochs == {"KV_site-1": 1, "KV_site-2": 0}


def test_bucket_deleted_between_plan_and_tasks(sites: str) -> None:
    with new_query(sites, buckets="site-1,site-2", **ACCEPT) as query:
        start = query.start()
        query.read_sequences()
    delete_bucket(sites, "site-1")
    with new_query(sites, offset=query.offset, buckets="site-1,site-2", **ACCEPT) as accepting:
        assert accepting.read_range(start, query.offset) == {"site-2": [1]}
    with (
        new_query(sites, offset=query.offset, buckets="site-1,site-2") as strict,
        pytest.raises(DataLossError, match=r"KV_site-1.*was deleted"),
    ):
        strict.read_range(start, query.offset)


@pytest.mark.parametrize("known", [True, False], ids=["in the offset", "just found"])
def test_bucket_deleted_between_poll_and_plan(
    sites: str, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """The poll has seen it; the requests of its plan do not. The next poll reports it."""
    with new_query(sites, **SITES, **ACCEPT) as query:
        query.read_sequences()
        if not known:
            create_bucket(sites, "site-3")
        name = "site-1" if known else "site-3"
        put_many(sites, name, [("x", b"v")])
        put(sites, "site-2", "k", b"v")
        original = StreamStates.poll
        deleted: list[str] = []

        async def then_deleted(states: StreamStates, known: Iterable[str]) -> dict[str, StreamView]:
            views = await original(states, known)
            if not deleted:
                delete_bucket(sites, name)
                deleted.append(name)
            return views

        monkeypatch.setattr(StreamStates, "poll", then_deleted)
        assert query.read_sequences() == {"site-2": [2]}
        assert deleted == [name]
        assert query.positions == {"KV_site-2": 2} | ({} if known else {"KV_site-1": 2})


def test_listed_bucket_that_does_not_exist(sites: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BucketNotFoundError, match=r"buckets=site-1,site-9.*site-9"):
        read_all(sites, buckets="site-1,site-9")
    with pytest.raises(StreamNotFoundError, match="streams=nothing"):
        read_all(sites, streams="nothing")


def test_pattern_without_match_waits_and_logs_once(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with new_query(url, **SITES) as query:
        assert query.read_sequences() == {}
        assert query.read_sequences() == {}
        assert caplog.text.count("no name matches the pattern") == 1
        fill_bucket(url, "site-1", [("a", b"v")])
        assert query.read_sequences() == {"site-1": [1]}


def test_pattern_reads_buckets_only(sites: str) -> None:
    create_stream(sites, "site-x", "x.>")
    create_stream(sites, "OBJ_site", "$O.site.>")
    with new_query(sites, bucketPattern=".*site.*") as query:
        assert query.read_sequences() == {"site-1": [1, 2], "site-2": [1]}


def test_stream_that_cannot_be_read_again_is_error_that_names_it(
    url: str,
) -> None:
    create_stream(url, "ok", "ok")
    create_stream(url, "jobs", "jobs", retention="workqueue")
    with pytest.raises(UnsupportedStreamError, match="jobs"):
        read_all(url, streamPattern=".*")


# -- checkpoints ---------------------------------------------------------------------------------


def test_checkpoint_of_one_bucket_continues_in_set(sites: str) -> None:
    with new_query(sites, bucket="site-1") as query:
        query.read_sequences()
    put(sites, "site-1", "k", b"v")
    with new_query(sites, offset=query.offset, buckets="site-1,site-2") as several:
        assert several.read_sequences() == {"site-1": [3], "site-2": [1]}
    assert several.offset is not None
    assert several.offset["v"] == 2


@pytest.mark.parametrize(
    ("before", "now", "problem"),
    [
        ("site-1,site-2", {"bucket": "site-1"}, r"of several streams \(KV_site-1, KV_site-2\)"),
        ("site-1", {"buckets": "site-2"}, "it is of KV_site-1, and buckets=site-2 selects none"),
    ],
)
def test_checkpoint_of_other_buckets_is_refused(
    sites: str, before: str, now: dict[str, str], problem: str
) -> None:
    with new_query(sites, buckets=before) as query:
        query.read_sequences()
    with pytest.raises(OffsetError, match=problem):
        read_all(sites, offset=query.offset, **now)


def test_filter_that_no_bucket_can_match(url: str) -> None:
    for name in ("orders", "returns"):
        create_stream(url, name)
        publish(url, [(f"{name}.1", b"v", None)])
    with new_query(url, streamPattern=".*", filterSubjects="orders.>") as query:
        assert query.read_sequences() == {"orders": [1]}
    with pytest.raises(ConfigurationError, match=r"audit\.>"):
        read_all(url, streamPattern=".*", filterSubjects="audit.>")
