"""The command `follow` is killed (-9) at random points, while a client writes to the bucket.

Afterwards a run with ``--once`` makes the table equal to the bucket, and the history to that of all
writes. ``FOLLOW_KILLS`` sets the number of kills of each table, ``FOLLOW_SEED`` the points.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.follower import (
    TABLES,
    follow_once,
    following,
    positions,
    unnamed_files,
    version,
    written_bucket,
)
from tests.support.nats import buckets

pytestmark = pytest.mark.faults

KILLS = int(os.environ.get("FOLLOW_KILLS", "6"))
SEED = int(os.environ.get("FOLLOW_SEED", "1"))


@pytest.mark.parametrize("kind", TABLES)
def test_killed_follower_loses_nothing(nats_server: NatsServer, tmp_path: Path, kind: str) -> None:
    words, query = TABLES[kind]
    url, table, rng = nats_server.url, tmp_path / "table", random.Random(f"{SEED} {kind}")
    writer = written_bucket(url, 20, query, rng=rng, expiring=True)
    follow_once(url, "b", table, *words)
    with writer:
        in_commits = early = 0
        for kill in range(KILLS):
            before, unnamed = version(table), unnamed_files(table)
            with following(url, "b", table, "--commit-interval", "0", *words) as follower:
                if kill % 4 == 3:
                    time.sleep(rng.uniform(0, 2))  # the start, too
                else:
                    follower.wait_for_commits()
                    time.sleep(rng.uniform(0, 0.5))
                follower.alive()
                follower.kill()
            early += version(table) == before
            in_commits += unnamed_files(table) > unnamed
        with following(url, "b", table, *words) as follower:
            writer.stop()  # a marker of a key with a TTL does not stay
            follower.wait_for_rows(writer, query)
            assert follower.end() == 0, follower.errors
    print(
        f"{kind}: {KILLS} kills, {in_commits} between data files and their commit, {early} before "
        f"the first commit, {version(table)} versions, {len(writer.written)} writes, seed {SEED}"
    )
    assert version(table) > KILLS // 2
    assert in_commits or KILLS < 20  # a share of the kills
    follow_once(url, "b", table, *words)
    assert writer.differences(query, table) == []
    assert positions(table)[-1].sequence == buckets.bucket_state(url, "b")["last_seq"]
