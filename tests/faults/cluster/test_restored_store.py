"""Stores that are put back to an earlier copy, under a query's checkpoint: of all servers, of one.

With all three, acknowledged writes are lost, and the query reports it. With one alone, the other
two have them: they repair the server, and until then its responses do not count.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from nats_stream_source.errors import DataLossError
from tests.faults.cluster.replica_state import create_replicated
from tests.support.nats.cluster import Cluster
from tests.support.nats.store_files import keep_store
from tests.support.proxy.fault_proxy import Outcome, Proxy
from tests.support.proxy.verdicts import Published
from tests.support.recorded_stream import KINDS
from tests.support.wait import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.cluster(lines=True)]

OLD, MORE = 200, 100
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
    own_cluster: Cluster,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    role: str,
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
