"""SIGTERM at random points: the command `follow` ends with status 0 and loses nothing."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.follower import (
    QUERY,
    follow_once,
    following,
    operation,
    positions,
    unnamed_files,
    version,
    written_bucket,
)

pytestmark = pytest.mark.faults

STOPS = 8


def test_follower_stopped_at_random_points(nats_server: NatsServer, tmp_path: Path) -> None:
    url, table, rng = nats_server.url, tmp_path / "table", random.Random(1)
    writer = written_bucket(url, 20, rng=rng)
    follow_once(url, "b", table)
    with writer:
        for _ in range(STOPS):
            with following(url, "b", table, "--commit-interval", "0") as follower:
                follower.wait_for_commits()
                time.sleep(rng.uniform(0, 0.3))
                assert follower.end() == 0, follower.errors
                # Each commit of rows has a position; a compaction does not.
                last = positions(table)[-1].version
                assert {operation(table, n) for n in range(last + 1, version(table) + 1)} <= {
                    "OPTIMIZE"
                }
        writer.stop()
    assert unnamed_files(table) == set()  # a commit that has begun is made
    follow_once(url, "b", table)
    assert writer.differences(QUERY, table) == []
