"""The server, its stream's leader or a mirror is lost and comes back while `follow` runs."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.follower import (
    QUERY,
    TABLES,
    MixedWriter,
    Query,
    follow_once,
    following,
    positions,
    version,
    written_bucket,
)
from tests.support.nats import buckets
from tests.support.nats.backup import back_up, restore_changes_created
from tests.support.nats.cluster import Cluster
from tests.support.nats.store_files import keep_store
from tests.support.nats.topology import make_mirror

pytestmark = pytest.mark.faults


ACCEPT = ("--option", "failOnDataLoss=false")


@pytest.mark.parametrize("kind", ["removed", "history"])
def test_server_killed_and_started_again(
    nats_server: NatsServer, tmp_path: Path, kind: str
) -> None:
    words, query = TABLES[kind]
    url = nats_server.url
    writer = written_bucket(url, 20, query)
    with following(url, "b", tmp_path / "table", "--commit-interval", "0", *words) as follower:
        follower.wait_for_rows(writer, query)
        for _ in range(3):
            writer.write(100)
            before = nats_server.pid
            nats_server.kill()
            nats_server.start()
            assert nats_server.pid != before
            writer.write(100)
            follower.wait_for_rows(writer, query)
        assert follower.errors.count("consumer rebuilt") >= 3
        assert follower.end() == 0, follower.errors
    assert positions(tmp_path / "table")[-1].sequence == buckets.bucket_state(url, "b")["last_seq"]


def test_server_away_for_longer_than_outage_timeout(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    url, table = nats_server.url, tmp_path / "table"
    writer = written_bucket(url, 20)
    with following(url, "b", table, "--option", "outageTimeout=1") as follower:
        follower.wait_for_rows(writer, QUERY)
        nats_server.kill()
        assert follower.process.wait(60) == 1
        assert "servers are away" in follower.errors
        assert "could not be restored within 1 s" in follower.errors  # not connectTimeout
        assert "Traceback" not in follower.errors
    nats_server.start()
    writer.write(20)
    follow_once(url, "b", table)
    assert writer.differences(QUERY, table) == []


@pytest.mark.parametrize("other", [False, True], ids=["all keys", "after other keys"])
def test_signal_while_server_is_away(nats_server: NatsServer, tmp_path: Path, other: bool) -> None:
    url, table = nats_server.url, tmp_path / "table"
    writer = written_bucket(url, 20)
    words = ("--option", "keys=*.*") if other else ()
    with following(url, "b", table, *words) as follower:
        follower.wait_for_rows(writer, QUERY)
        if other:
            buckets.put(url, "b", "other", b"x")
            time.sleep(1.5)  # a heartbeat tells the follower of it
        nats_server.kill()
        follower.wait(lambda: "servers are away" in follower.errors, "an outage")
        assert follower.end() == 0, follower.errors
    nats_server.start()
    writer.write(20)
    follow_once(url, "b", table, *words)
    assert writer.differences(QUERY, table) == []


def restored(server: NatsServer, directory: Path) -> Callable[[], None]:
    return back_up(server.url, "KV_b")


@pytest.mark.parametrize("runs", [True, False], ids=["while it runs", "between two runs"])
def test_bucket_restored_with_all_entries(
    nats_server: NatsServer, tmp_path: Path, runs: bool
) -> None:
    url, table = nats_server.url, tmp_path / "table"
    writer = written_bucket(url, 200)
    created = buckets.bucket_info(url, "b")["created"]
    restore = back_up(url, "KV_b")
    with following(url, "b", table) as follower:
        follower.wait_for_rows(writer, QUERY)
        if not runs:
            assert follower.end() == 0, follower.errors
            restore()
        else:
            with follower.paused():
                restore()
            writer.write(100)
            follower.wait_for_rows(writer, QUERY)
            assert follower.end() == 0, follower.errors
    changed = buckets.bucket_info(url, "b")["created"] != created
    assert changed == restore_changes_created(url)
    writer.write(100)
    follow_once(url, "b", table)
    assert writer.differences(QUERY, table) == []
    assert len({one.created for one in positions(table)}) == 1 + changed


def re_created(server: NatsServer, directory: Path) -> Callable[[], None]:
    def create() -> None:
        buckets.delete_bucket(server.url, "b")
        buckets.create_bucket(server.url, "b")

    return create


LOSSES: dict[str, tuple[Callable[[NatsServer, Path], Callable[[], None]], str]] = {
    "re-created": (re_created, "deleted and re-created"),
    "restored from an older backup": (restored, "rolled back"),
    "rolled back": (keep_store, "rolled back"),
}


@pytest.mark.parametrize("runs", [True, False], ids=["while it runs", "between two runs"])
@pytest.mark.parametrize("loss", LOSSES)
def test_lost_entries_end_command_until_accepted(
    nats_server: NatsServer, tmp_path: Path, loss: str, runs: bool
) -> None:
    prepare, reported = LOSSES[loss]
    url, table = nats_server.url, tmp_path / "table"
    buckets.create_bucket(url, "b")
    buckets.put_many(url, "b", [(f"old.{n}", b"x") for n in range(100)])
    lose = prepare(nats_server, tmp_path)
    buckets.put_many(url, "b", [(f"lost.{n}", b"x") for n in range(50)])
    with following(url, "b", table) as follower:
        follower.wait(lambda: len(stored(table)) == 150, "all rows")
        if runs:
            with follower.paused():
                lose()
                buckets.put_many(url, "b", [(f"new.{n}", b"y") for n in range(10)])
            assert follower.process.wait(60) == 3
            assert reported in follower.errors
        else:
            assert follower.end() == 0, follower.errors
            lose()
            buckets.put_many(url, "b", [(f"new.{n}", b"y") for n in range(10)])
    assert reported in follow_once(url, "b", table, status=3)
    assert reported in follow_once(url, "b", table, *ACCEPT)
    buckets.put_many(url, "b", [(f"later.{n}", b"y") for n in range(10)])
    follow_once(url, "b", table)
    new = {f"{name}.{n}" for name in ("new", "later") for n in range(10)}
    old = {f"old.{n}" for n in range(100)}
    # The query goes on after the last message that is left: it does not read the bucket again.
    lost = {f"lost.{n}" for n in range(50)}
    assert stored(table) == (new if loss == "re-created" else new | old | lost)


@pytest.mark.parametrize("loss", LOSSES)
def test_lost_entries_accepted_while_command_runs(
    nats_server: NatsServer, tmp_path: Path, loss: str
) -> None:
    prepare, reported = LOSSES[loss]
    url, table = nats_server.url, tmp_path / "table"
    buckets.create_bucket(url, "b")
    buckets.put_many(url, "b", [(f"old.{n}", b"x") for n in range(100)])
    lose = prepare(nats_server, tmp_path)
    buckets.put_many(url, "b", [(f"lost.{n}", b"x") for n in range(50)])
    with following(url, "b", table, *ACCEPT) as follower:
        follower.wait(lambda: len(stored(table)) == 150, "all rows")
        with follower.paused():
            lose()
            buckets.put_many(url, "b", [(f"new.{n}", b"y") for n in range(10)])
        kept = set() if loss == "re-created" else {f"old.{n}" for n in range(100)}
        new = {f"new.{n}" for n in range(10)}
        follower.wait(
            lambda: (kept | new) <= stored(table) and (kept or stored(table) == new),
            "the new rows",
            seen=lambda: (stored(table), follower.errors),
        )
        assert reported in follower.errors
        assert follower.end() == 0, follower.errors
    follow_once(url, "b", table)


def stored(table: Path) -> set[str]:
    return {row[1] for row in QUERY.stored(table)} if version(table) >= 0 else set()


QUERIES = {
    "values": Query({"bucket": "b"}),
    "history": Query({"bucket": "b"}, {"stored_as_scd_type": 2}),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.mark.parametrize("kind", QUERIES)
def test_stream_leader_changes(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    query, table, stream = QUERIES[kind], tmp_path / "table", f"KV_{kind}"
    words = ["--history"] if query.has_history else []
    query = Query({"bucket": kind}, query.arguments)
    urls = ",".join(cluster.urls)
    buckets.create_bucket(cluster.url, kind, 64 if query.has_history else 1, num_replicas=3)
    cluster.wait_ready(stream)
    writer = MixedWriter(cluster.url, kind, random.Random(1))
    writer.write(50)
    with following(urls, kind, table, "--commit-interval", "0", *words) as follower:
        follower.wait_for_commits()
        leaders = [cluster.leader_of(stream)]
        for _ in range(4):
            writer.write(100)
            leaders.append(cluster.step_down(stream))
            cluster.wait_ready(stream)
            writer.write(100)
            follower.wait_for_rows(writer, query)
        assert all(one is not other for one, other in itertools.pairwise(leaders))
        # A killed leader, which is not the server that the writer uses.
        leader = cluster.move_leader(stream, cluster.servers["n1"])
        writer.write(100)
        leader.kill()
        cluster.wait_writable(cluster.url, f"$KV.{kind}.>")
        assert cluster.leader_of(stream) is not leader
        writer.write(100)
        follower.wait_for_rows(writer, query)
        leader.start()
        cluster.wait_ready(stream)
        writer.write(50)
        follower.wait_for_rows(writer, query)
        assert follower.end() == 0, follower.errors
    follow_once(urls, kind, table, *words)
    assert writer.differences(query, table) == []
    assert positions(table)[-1].sequence == buckets.bucket_state(cluster.url, kind)["last_seq"]


def test_signal_at_start_without_leader(cluster: Cluster, tmp_path: Path) -> None:
    buckets.create_bucket(cluster.url, "b", num_replicas=3)
    cluster.wait_ready("KV_b")
    cluster.move_leader("KV_b", cluster.servers["n1"])
    others = [cluster.servers["n2"], cluster.servers["n3"]]
    for server in others:
        server.kill()
    try:
        with following(cluster.url, "b", tmp_path / "table") as follower:
            follower.wait(lambda: "retrying request" in follower.errors, "a retry")
            assert follower.end() == 0, follower.errors
    finally:
        for server in others:
            server.start()
    cluster.wait_ready("KV_b")
    buckets.put(cluster.url, "b", "a", b"x")
    follow_once(cluster.url, "b", tmp_path / "table")
    assert len(Query({"bucket": "b"}).stored(tmp_path / "table")) == 1


MIRROR = Query({"bucket": "m"})


@pytest.mark.parametrize("runs", [True, False], ids=["while it runs", "between two runs"])
def test_mirror_created_again(nats_server: NatsServer, tmp_path: Path, runs: bool) -> None:
    url, table = nats_server.url, tmp_path / "table"
    writer = written_bucket(url, 100)

    def mirror() -> str:
        made = make_mirror(url, "KV_m", "KV_b", max_msgs_per_subject=1, allow_direct=True)
        return str(made["created"])

    created = mirror()
    with following(url, "m", table) as follower:
        follower.wait_for_rows(writer, MIRROR)
        writer.write(100)
        follower.wait_for_rows(writer, MIRROR)
        nats_server.kill()
        nats_server.start()
        writer.write(100)
        follower.wait_for_rows(writer, MIRROR)
        if not runs:
            assert follower.end() == 0, follower.errors
            buckets.delete_bucket(url, "m")
            assert mirror() != created
        else:
            with follower.paused():
                buckets.delete_bucket(url, "m")
                assert mirror() != created
            writer.write(100)
            follower.wait_for_rows(writer, MIRROR)
            assert follower.end() == 0, follower.errors
    writer.write(100)
    follow_once(url, "m", table)
    assert writer.differences(MIRROR, table) == []
    assert len({one.created for one in positions(table)}) == 2


def test_signal_while_mirror_is_behind(nats_server: NatsServer, tmp_path: Path) -> None:
    url, table = nats_server.url, tmp_path / "table"
    writer = written_bucket(url, 100)
    make_mirror(url, "KV_m", "KV_b", max_msgs_per_subject=1, allow_direct=True)
    follow_once(url, "m", table)
    for bucket in ("m", "b"):
        buckets.delete_bucket(url, bucket)
    buckets.create_bucket(url, "b")
    make_mirror(url, "KV_m", "KV_b", max_msgs_per_subject=1, allow_direct=True)
    with following(url, "m", table) as follower:
        follower.wait(lambda: "mirror is behind" in follower.errors, "a mirror that is behind")
        assert follower.end() == 0, follower.errors
    assert writer.differences(MIRROR, table) == []
