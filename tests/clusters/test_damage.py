"""A server whose store was damaged: it drops what it cannot read, and says that it has all.

Its replica is as long as the leader's, so the server counts it as current, and does not mend it.
Whatever it delivers, a row that the leader has is never passed over in silence.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from buckets import api, publish
from drivers import driver
from faults.batches import BATCHES, kind_of, options_of, read
from faults.harm import Published
from faults.proxy import Proxy
from faults.trial import KINDS, Trial
from pyarrow.dataset import dataset
from topology import wait_until

from clusters.watched import WatchedCluster, create_replicated
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DamagedReplicaError
from nats_stream_source.source import replicas

pytestmark = pytest.mark.faults

COUNT, SIZE = 1500, 10_000
"""Several blocks of the server's store; the first one is damaged, and lost from there on."""

KEYS = 20_000
_MOST_READS = 60
_MOST_ATTEMPTS = 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[WatchedCluster]:
    with WatchedCluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_PAUSE", 0.05)


def messages(directory: Path, stream: str) -> Path:
    """Where a server keeps the messages of a stream."""
    return next(directory.rglob(f"streams/{stream}/msgs"))


def damaged(cluster: WatchedCluster, kind: str) -> tuple[Trial, NatsServer]:
    """A trial, and one of its followers that has lost a part of the first block."""
    for _ in range(_MOST_ATTEMPTS):
        trial = create_replicated(cluster, kind, COUNT, SIZE)
        follower = cluster.followers_of(trial.stream)[0]
        follower.kill()
        block = messages(follower.store, trial.stream) / "1.blk"
        content = bytearray(block.read_bytes())
        at = len(content) // 20
        content[at : at + 16] = bytes(byte ^ 0xFF for byte in content[at : at + 16])
        block.write_bytes(content)
        follower.start()

        def state(trial: Trial = trial, follower: NatsServer = follower) -> dict[str, Any]:
            return cluster.state_at(follower, trial.stream)

        wait_until("it has come up to the end", lambda s=state: s().get("last_seq") == COUNT)
        cluster.wait_current(trial.stream)
        assert trial.state()["messages"] == COUNT
        if state()["messages"] < COUNT and cluster.leader_of(trial.stream) is not follower:
            return trial, follower
        # Where it has lost its end as well, it fetches all that comes after what is left.
    raise AssertionError("it was mended each time")


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_lacks_is_not_passed_over(cluster: WatchedCluster, kind: str) -> None:
    """All rows, or an error that names the server; until its replica is copied anew."""
    trial, follower = damaged(cluster, kind)
    told: list[str] = []
    for _ in range(_MOST_READS):
        if len(told) == 2:
            break
        with trial.reading(minPartitions="4") as reading:
            try:
                reading.until(trial.last)
            except DamagedReplicaError as error:
                told.append(str(error))
            else:
                trial.check(reading.rows)
    # The last values of keys are read at the leader at once.
    assert len(told) == (0 if kind == "kv current" else 2)
    assert all(cluster.name_of(follower) in text for text in told)

    store = messages(follower.store, trial.stream).parent
    follower.kill()
    shutil.rmtree(store)
    follower.start()
    wait_until(
        "it is copied anew",
        lambda: cluster.state_at(follower, trial.stream).get("messages") == COUNT,
    )
    cluster.wait_current(trial.stream)
    for _ in range(5):
        with trial.reading(minPartitions="4") as reading:
            reading.until(trial.last)
        trial.check(reading.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_another_attempt_reads_at_the_leader(cluster: WatchedCluster, kind: str) -> None:
    trial, _ = damaged(cluster, kind)
    with trial.reading(minPartitions="4") as reading:
        assert reading.plan()
        logged = reading.logged
        assert logged is not None
        for _ in range(5):
            trial.check(reading.read(at_leader=True))
            del reading.offsets[1:]
            reading.again(logged)


@pytest.mark.parametrize("what", BATCHES)
def test_batches(cluster: WatchedCluster, what: str) -> None:
    trial, _ = damaged(cluster, kind_of(what))
    options = options_of(trial, what)
    told = 0
    for _ in range(_MOST_READS if what in ("all", "stream") else 8):
        try:
            found = read(cluster.url, options)
        except DamagedReplicaError:
            told += 1
            break
        trial.check(found)
    assert told == (what in ("all", "stream"))


class Purge(Published):
    """Purges the first half of a stream when the leader is first asked for a message."""

    def __init__(self, trial: Trial) -> None:
        super().__init__("$JS.API.STREAM.MSG.GET.", most=1, outcome=True)
        self._trial = trial
        self.armed = False

    def hits(self, frame: bytes) -> bool:
        if not self.armed or not super().hits(frame):
            return False
        api(self._trial.url, f"STREAM.PURGE.{self._trial.stream}", {"seq": COUNT // 3 * 2})
        return True


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_a_message_that_the_leader_is_about_to_remove(cluster: WatchedCluster, kind: str) -> None:
    """The replica has removed it already: so it looks until the leader has, too."""
    trial, _ = damaged(cluster, kind)
    purge = Purge(trial)
    for _ in range(_MOST_READS):
        proxied = Proxy(int(trial.url.rsplit(":", 1)[1]), upward=purge, keep=0)
        with proxied as proxy, trial.reading(proxy.url, failOnDataLoss="false") as reading:
            purge.armed = False
            assert reading.plan()
            purge.armed = True
            reading.read()
        if purge.done:
            break
    assert purge.done == 1
    assert len(reading.rows) < COUNT


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_what_goes_away_meanwhile_is_no_damage(cluster: WatchedCluster, kind: str) -> None:
    """Each write removes an older one, on one server a moment before it does on another."""
    trial = Trial(kind, cluster.url).create(num_replicas=3, max_msgs_per_subject=1)
    messages = [(f"{trial.prefix}k{i}", bytes(100), None) for i in range(KEYS)]
    publish(trial.url, messages)
    over = threading.Event()

    def rewrite() -> None:
        while not over.is_set():
            publish(trial.url, messages)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(rewrite)
        try:
            for _ in range(15):
                with trial.reading(minPartitions="4", failOnDataLoss="false") as reading:
                    assert reading.plan()
                    reading.read()
                    assert 0 < len(reading.rows) <= KEYS
        finally:
            over.set()
        writing.result()
    state = trial.state()
    assert state["messages"] == KEYS
    assert state["last_seq"] > 2 * KEYS


@pytest.mark.parametrize("streaming", [True, False], ids=["a stream", "a batch"])
def test_spark_tries_again(cluster: WatchedCluster, tmp_path: Path, streaming: bool) -> None:
    """Tasks that met the damaged server fail, and their next attempts have all rows."""
    trial, _ = damaged(cluster, "stream")
    asked = {
        "servers": cluster.url,
        "master": "local[2,4]",
        "to_the_end": True,
        "queries": [
            {
                "format": "nats_stream",
                "options": {"stream": trial.stream, "minPartitions": "40"},
                "directory": str(tmp_path),
                "streaming": streaming,
                "point": "parquet",
                "batch": -1,
            }
        ],
    }
    with driver(tmp_path / "request.json", asked) as process:
        code = process.wait(600)
    said = (tmp_path / "request.log").read_text()
    assert code == 0, said[-3000:]
    # Of 40 splits it lacks something in a dozen at least, and has a third of the consumers.
    assert "DamagedReplicaError" in said
    found = dataset(tmp_path / "rows.parquet").to_table()["sequence"].to_pylist()
    assert sorted(found) == list(range(1, COUNT + 1))
