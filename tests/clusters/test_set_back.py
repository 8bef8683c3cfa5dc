"""Stores that are put back to an earlier copy, under a query's checkpoint: of all servers, of one.

Of all three, acknowledged writes are gone, and the query says so. Of one alone, the other two have
them: the server is mended by them, and until then it speaks for nobody.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults.harm import Published
from faults.proxy import Outcome, Proxy
from faults.trial import KINDS
from topology import wait_until

from clusters.watched import WatchedCluster, create_replicated
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError

pytestmark = pytest.mark.faults

OLD, MORE = 200, 100
ACCEPT = {"failOnDataLoss": "false"}


@pytest.fixture
def cluster() -> Iterator[WatchedCluster]:
    with WatchedCluster(lines=True) as cluster:
        yield cluster


def keep(servers: list[NatsServer], directory: Path) -> Callable[[], None]:
    """Copy the stores of ``servers``, all at rest; call what this gives to put the copies back.

    The servers run again after either.
    """
    copies = {server: directory / str(server.port) for server in servers}
    for server in servers:
        server.terminate()
    for server, copy in copies.items():
        shutil.copytree(server.store / "jetstream", copy)
    for server in servers:
        server.start()

    def put_back() -> None:
        for server in servers:
            server.kill()
        for server, copy in copies.items():
            shutil.rmtree(server.store / "jetstream")
            shutil.copytree(copy, server.store / "jetstream")
        for server in servers:
            server.start()

    return put_back


@pytest.mark.parametrize("after", [0, 2 * MORE], ids=["", "more"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_three(cluster: WatchedCluster, tmp_path: Path, kind: str, after: int) -> None:
    """With ``after`` more writes before the checkpoint is used again."""
    trial = create_replicated(cluster, kind, OLD)
    put_back = keep(list(cluster.servers.values()), tmp_path)
    cluster.wait_ready(trial.stream)
    trial.write(MORE)
    with trial.reading(connectTimeout="60") as first:
        first.until(trial.last)
    trial.check(first.rows)

    put_back()
    cluster.wait_ready(trial.stream)
    assert trial.state()["last_seq"] == OLD
    trial.forget(OLD)
    if after:
        trial.write(after)

    lost = pytest.raises(DataLossError, match="was set back")
    with trial.reading(offsets=first.offsets, connectTimeout="60") as refused, lost:
        refused.plan()
    with trial.reading(offsets=first.offsets, connectTimeout="60", **ACCEPT) as second:
        second.drain()
        trial.write(MORE)
        second.until(trial.last)
    assert second.offsets[-1]["epoch"] == 1
    trial.check(second.rows, after=OLD)
    assert len(second.rows) == after + MORE


@pytest.mark.parametrize("role", ["leader", "follower"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_of_three(
    cluster: WatchedCluster,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    role: str,
) -> None:
    """The query comes to it before it has met the others again."""
    trial = create_replicated(cluster, kind, OLD)
    one, *others = cluster.servers.values()
    put_back = keep([one], tmp_path)
    cluster.wait_ready(trial.stream)
    trial.write(MORE)
    while (cluster.leader_of(trial.stream) is one) != (role == "leader"):
        cluster.step_down(trial.stream)
    cluster.wait_ready(trial.stream)
    with trial.reading(connectTimeout="60") as first:
        first.until(trial.last)

    with ExitStack() as held:
        for other in others:
            line = cluster.line(one, other)
            line.hold()
            held.callback(line.release)
        put_back()
        wait_until("it has its store", lambda: cluster.state_at(one, trial.stream) != {})
        assert cluster.last_seq_at(one, trial.stream) == OLD

        looks = Published("$JS.API.STREAM.INFO.")
        asked: list[int] = []

        def upward(frame: bytes) -> Outcome:
            if looks.hits(frame):
                asked.append(cluster.last_seq_at(one, trial.stream))
                if len(asked) == 3:
                    held.close()
            return True

        options = {"requestTimeout": "1", "connectTimeout": "120"}
        proxied = Proxy(one.port, upward=upward, keep=0)
        with proxied as proxy, trial.reading(proxy.url, first.offsets, **options) as second:
            second.drain()
            assert asked[:3] == [OLD] * 3
            cluster.wait_ready(trial.stream)
            trial.write(MORE)
            second.until(trial.last)
    assert second.offsets[-1]["epoch"] == 0
    trial.check(first.rows + second.rows)
    wait_until("it has all", lambda: cluster.last_seq_at(one, trial.stream) == trial.last)
    assert not [one for one in caplog.records if "data loss" in one.getMessage()]
