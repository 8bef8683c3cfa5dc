"""Servers that respond for a stream with less than a query has read of it.

A leader that is cut off still responds as the leader for some time. The others have elected another
leader and stored writes, and a query has read them; then it is restarted and reads from the old
leader: no loss is reported.

Stores are put back to an earlier copy under a query's checkpoint. With all three, acknowledged
writes are lost, and the query reports it. With one alone, the other two have them: they repair the
server, and until then its responses do not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from tests.faults.cluster.replica_state import create_replicated
from tests.support.nats.cluster import Cluster, leader_at
from tests.support.nats.store_files import keep_store
from tests.support.proxy.fault_proxy import Outcome, Proxy
from tests.support.proxy.verdicts import Counted, Published
from tests.support.recorded_stream import KINDS, RecordedStream
from tests.support.wait import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.cluster(lines=True)]

OLD, MORE = 200, 100
_MOST_ATTEMPTS = 5


@contextlib.contextmanager
def cut_off(cluster: Cluster, server: NatsServer) -> Iterator[contextlib.ExitStack]:
    """Closed, the lines between ``server`` and the others carry again."""
    with contextlib.ExitStack() as lines:
        for other in cluster.servers.values():
            if other is not server:
                line = cluster.line(server, other)
                line.hold()
                lines.callback(line.release)
        yield lines


@pytest.mark.parametrize("accept", [False, True], ids=["fail", "accept"])
@pytest.mark.parametrize("kind", KINDS)
def test_split_brain_restart_at_old_leader(
    cluster: Cluster, kind: str, accept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The planner repeats its request until the leader has a majority; each row is read once."""
    for _ in range(_MOST_ATTEMPTS):
        recorded = create_replicated(cluster, kind, OLD)
        if restarted_in_time(cluster, recorded, accept):
            break
    else:
        raise AssertionError("each time the old leader had noticed before the query came to it")
    assert not [one for one in caplog.records if "data loss" in one.getMessage()]


def restarted_in_time(cluster: Cluster, recorded: RecordedStream, accept: bool) -> bool:
    """Whether the old leader responded as one to the query."""
    old = cluster.move_leader(recorded.stream, cluster.meta_leader())
    name = cluster.name_of(old)
    other = next(one for one in cluster.servers.values() if one is not old)
    options = {"failOnDataLoss": str(not accept).lower()}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(recorded.query(other.url, **options))
        first.until(OLD)
        lines = stack.enter_context(cut_off(cluster, old))
        wait_until(
            lambda: leader_at(other.url, recorded.stream) not in ("", name), "another leader"
        )
        cluster.wait_writable(other.url, f"{recorded.prefix}>")
        recorded.write(MORE, url=other.url)
        first.until(recorded.last)

        looks = Published("$JS.API.STREAM.INFO.")
        answered: list[bool] = []

        def upward(frame: bytes) -> Outcome:
            if looks.hits(frame):
                # As what follows will be answered.
                answered.append(leader_at(old.url, recorded.stream) == name)
                if len(answered) == 5:
                    lines.close()
            return True

        options |= {"requestTimeout": "1", "connectTimeout": "60"}
        proxied = Proxy(old.port, upward=upward, keep=0)
        with proxied as proxy, recorded.query(proxy.url, first.offsets, **options) as second:
            second.drain()
            lines.close()
            recorded.write(MORE, url=other.url)
            second.until(recorded.last)
            assert second.offsets[-1]["epoch"] == 0
    recorded.check(first.rows + second.rows)
    return answered[0]


def older_responses(recorded: RecordedStream, *numbers: int) -> Counted:
    """Rewrites responses about the stream: it ends a hundred sequences earlier.

    Args:
        numbers: of these responses, counted from 1; the first one is for the start of a query.
    """
    had, has = (b'"last_seq":%d' % last for last in (recorded.last, recorded.last - MORE))
    return Counted(
        lambda frame: had in frame and b"stream_info_resp" in frame,
        numbers,
        lambda frame: frame.replace(had, has),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_deposed_leader_before_it_has_caught_up(cluster: Cluster, kind: str) -> None:
    """The old leader has a majority again, and lacks its messages: it reports this at most once.

    The moment is too short for a test, so its response is made from the present leader's.
    """
    recorded = create_replicated(cluster, kind, OLD + MORE)
    with recorded.query() as first:
        first.until(recorded.last)
    lie = older_responses(recorded, 2)
    proxied = Proxy(cluster.servers["n1"].port, lie, keep=0)
    with proxied as proxy, recorded.query(proxy.url, first.offsets) as second:
        assert not second.plan()
        assert lie.done == 1
        recorded.write(MORE)
        second.until(recorded.last)
    recorded.check(first.rows + second.rows)


def test_leader_reports_lower_sequence_twice(cluster: Cluster) -> None:
    recorded = create_replicated(cluster, "kv", OLD + MORE)
    with recorded.query() as first:
        first.until(recorded.last)
    lie = older_responses(recorded, 2, 3)
    proxied = Proxy(cluster.servers["n1"].port, lie, keep=0)
    lost = pytest.raises(DataLossError, match="was rolled back: last revision is 200,")
    with proxied as proxy, recorded.query(proxy.url, first.offsets) as second, lost:
        second.plan()
    assert lie.done == 2


# -- stores that are put back ----------------------------------------------------------------------


ACCEPT = {"failOnDataLoss": "false"}


@pytest.mark.parametrize("after", [0, 2 * MORE], ids=["", "more"])
@pytest.mark.parametrize("kind", KINDS)
def test_restored_store_on_all_replicas(
    own_cluster: Cluster, tmp_path: Path, kind: str, after: int
) -> None:
    """With ``after`` more writes before the checkpoint is used again."""
    recorded = create_replicated(own_cluster, kind, OLD)
    one, *others = own_cluster.servers.values()
    put_back = keep_store(one, tmp_path, *others)
    own_cluster.wait_ready(recorded.stream)
    recorded.write(MORE)
    with recorded.query(connectTimeout="60") as first:
        first.until(recorded.last)
    recorded.check(first.rows)

    put_back()
    own_cluster.wait_ready(recorded.stream)
    assert recorded.state()["last_seq"] == OLD
    recorded.remove_after(OLD)
    if after:
        recorded.write(after)

    lost = pytest.raises(DataLossError, match="was rolled back")
    with recorded.query(offsets=first.offsets, connectTimeout="60") as refused, lost:
        refused.plan()
    with recorded.query(offsets=first.offsets, connectTimeout="60", **ACCEPT) as second:
        second.drain()
        recorded.write(MORE)
        second.until(recorded.last)
    assert second.offsets[-1]["epoch"] == 1
    recorded.check(second.rows, after=OLD)
    assert len(second.rows) == after + MORE


@pytest.mark.parametrize("role", ["leader", "follower"])
@pytest.mark.parametrize("kind", KINDS)
def test_restored_store_on_one_replica(
    own_cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, role: str
) -> None:
    """The query is connected to it before it has a route to the others."""
    recorded = create_replicated(own_cluster, kind, OLD)
    one, *others = own_cluster.servers.values()
    put_back = keep_store(one, tmp_path)
    own_cluster.wait_ready(recorded.stream)
    recorded.write(MORE)
    while (own_cluster.leader_of(recorded.stream) is one) != (role == "leader"):
        own_cluster.step_down(recorded.stream)
    own_cluster.wait_ready(recorded.stream)
    with recorded.query(connectTimeout="60") as first:
        first.until(recorded.last)

    with ExitStack() as held:
        for other in others:
            line = own_cluster.line(one, other)
            line.hold()
            held.callback(line.release)
        put_back()
        wait_until(lambda: own_cluster.state_at(one, recorded.stream) != {}, "it has its store")
        assert own_cluster.last_seq_at(one, recorded.stream) == OLD

        looks = Published("$JS.API.STREAM.INFO.")
        asked: list[int] = []

        def upward(frame: bytes) -> Outcome:
            if looks.hits(frame):
                asked.append(own_cluster.last_seq_at(one, recorded.stream))
                if len(asked) == 3:
                    held.close()
            return True

        options = {"requestTimeout": "1", "connectTimeout": "120"}
        proxied = Proxy(one.port, upward=upward, keep=0)
        with proxied as proxy, recorded.query(proxy.url, first.offsets, **options) as second:
            second.drain()
            assert asked[:3] == [OLD] * 3
            own_cluster.wait_ready(recorded.stream)
            recorded.write(MORE)
            second.until(recorded.last)
    assert second.offsets[-1]["epoch"] == 0
    recorded.check(first.rows + second.rows)
    wait_until(lambda: own_cluster.last_seq_at(one, recorded.stream) == recorded.last, "it has all")
    assert not [one for one in caplog.records if "data loss" in one.getMessage()]
