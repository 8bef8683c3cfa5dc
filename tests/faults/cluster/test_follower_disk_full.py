"""A follower with a full disk: the majority continues, and all it acknowledges is read.

The store of the server is bounded by its disk (a small one) or by its own limit. A full server
reports nothing: it stores no more of the stream, and counts as one that lags. So the test compares
the end of the stream, which is beyond the limit, with the end of the replica, far before it.

The server leads nothing while it is full. One that does may claim to lead permanently (nats-server
2.15.1); no test here covers that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.cluster.replica_state import create_replicated, read_with_retries
from tests.support.nats.cluster import Cluster
from tests.support.nats.store_files import small_disk
from tests.support.query_driver.batch import BATCHES, batch_options, read_sorted, recorded_kind
from tests.support.recorded_stream import KINDS, RecordedStream, Writing
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

SIZE = 10_000
MEGABYTES = 24
"""What the server can store."""

_DEADLINE = 300.0  # seconds; only a failing test takes that long
_PATIENCE = {"requestTimeout": "2", "connectTimeout": "60"}


@dataclass
class Small:
    """A cluster, one of whose servers can store little, until ``grow`` is called."""

    cluster: Cluster
    server: NatsServer
    grow: Callable[[], None]

    def others(self) -> list[str]:
        return [one.url for one in self.cluster.servers.values() if one is not self.server]

    def create(self, kind: str) -> RecordedStream:
        """A recorded stream; it and the meta group are led by others."""
        recorded = create_replicated(self.cluster, kind)
        self.cluster.move_leader(recorded.stream, self.server)
        while self.cluster.meta_leader() is self.server:
            self.cluster.step_down_meta()
        return recorded

    def has(self, recorded: RecordedStream) -> int:
        """The last sequence that the server reports; 0 without a response."""
        return int(self.cluster.state_at(self.server, recorded.stream).get("last_seq", 0))

    def fill(self, recorded: RecordedStream, writing: Writing) -> int:
        """Wait until it takes nothing more; the last sequence that it has."""
        had = 0

        def full() -> bool:
            nonlocal had
            before, had = had, self.has(recorded)
            if had != before or recorded.last * SIZE < 2 * MEGABYTES * 10**6:
                writing.wait(200)
                return False
            return recorded.last > had + 500

        wait_until(full, "it takes nothing more", deadline=_DEADLINE)
        return had

    def check_left_behind(self, recorded: RecordedStream, had: int) -> None:
        """It still has no more than when it was full, and others led all the time."""
        assert self.has(recorded) <= had < recorded.last - 500
        assert had * SIZE < 1.5 * MEGABYTES * 10**6  # some were under way
        assert self.cluster.leader_of(recorded.stream) is not self.server


@contextlib.contextmanager
def small_by_disk(directory: Path) -> Iterator[Small]:
    disk = directory / "disk"
    with small_disk(disk, MEGABYTES) as resize, Cluster(stores={"n3": disk}) as cluster:
        yield Small(cluster, cluster.servers["n3"], lambda: resize(50 * MEGABYTES))


@contextlib.contextmanager
def small_by_limit(directory: Path) -> Iterator[Small]:
    limit = f"{MEGABYTES}MB"
    with Cluster(extra_config={"n3": f"jetstream {{ max_file_store: {limit} }}\n"}) as cluster:

        def grow() -> None:
            config = cluster.configs["n3"]
            config.write_text(config.read_text().replace(limit, "10GB"))

        yield Small(cluster, cluster.servers["n3"], grow)


@pytest.fixture(params=[small_by_disk, small_by_limit], ids=["disk", "limit"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Small]:
    with request.param(tmp_path) as small:
        yield small


@pytest.mark.parametrize("kind", KINDS)
def test_follower_disk_full_while_query_runs(small: Small, kind: str) -> None:
    """The query is connected to that server, which forwards the responses of the others."""
    recorded = small.create(kind)
    with (
        recorded.query(small.server.url, **_PATIENCE) as query,
        recorded.writing(small.others(), SIZE) as writing,
    ):
        had = small.fill(recorded, writing)
        read_with_retries(query, recorded.last)
        writing.wait(500)
        writing.stop()
        read_with_retries(query, recorded.last)
        small.check_left_behind(recorded, had)

        small.grow()
        small.server.restart()
        small.cluster.wait_ready(recorded.stream)
        assert small.has(recorded) == recorded.last
        recorded.write(100)
        read_with_retries(query, recorded.last)
    recorded.check(query.rows)


@pytest.mark.parametrize("what", BATCHES)
def test_follower_disk_full_while_batch_runs(small: Small, what: str) -> None:
    recorded = small.create(recorded_kind(what))
    with recorded.writing(small.others(), SIZE) as writing:
        had = small.fill(recorded, writing)
        writing.stop()
    recorded.check(read_sorted(small.server.url, {**batch_options(recorded, what), **_PATIENCE}))
    small.check_left_behind(recorded, had)
