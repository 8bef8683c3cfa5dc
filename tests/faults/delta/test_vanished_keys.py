"""``reconcile`` between merges of random entries, while keys vanish from their bucket."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nats_stream_source.delta import Deletes
from tests.integration.delta.kv_bucket import Bucket, Reconciled
from tests.integration.delta.merge_model import Entry, Frame, Merge, both_modes, every_engine
from tests.integration.delta.table_content import live

pytestmark = pytest.mark.delta


@every_engine
@both_modes
def test_random_interleavings_with_keys_that_vanish(
    frame: Frame,
    table: Path,
    bucket: Bucket,
    reconciled: Reconciled,
    deletes: Deletes,
    merge: Merge,
) -> None:
    rng = random.Random(3)
    unread: list[Entry] = []
    values: dict[str, int] = {}
    removed = 0
    for _ in range(2):
        wanted = [
            (rng.choice("abcdefghijkl"), rng.choice(["PUT", "PUT", "PUT", "DEL", "PURGE"]))
            for _ in range(15)
        ]
        written = bucket.write(*wanted)
        unread += written
        for entry in written:
            if entry.operation == "PUT":
                values[entry.key] = entry.revision
            else:
                values.pop(entry.key, None)
        read = rng.randrange(len(unread)) + 1
        merge(frame(*unread[:read]), str(table), deletes=deletes)
        unread = unread[read:]
        gone = rng.sample(sorted(values), 2)
        bucket.purge_subjects(*gone)
        for key in gone:
            del values[key]
        removed += reconciled(deletes=deletes).removed
        # No row of a missing key stays, and no live key that the query has read is lost.
        behind = {entry.key for entry in unread}
        assert live(table).keys() <= values.keys()
        assert live(table).keys() >= values.keys() - behind
    merge(frame(*unread), str(table), deletes=deletes)
    reconciled(deletes=deletes)
    assert live(table) == values
    assert removed
