"""``reconcile`` between merges of random entries, while keys vanish from their bucket."""

from __future__ import annotations

import base64
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from nats_stream_source.delta import Deletes
from nats_stream_source.delta.compare_with_bucket import compare_with_bucket
from nats_stream_source.delta.rules.events import EventShape
from nats_stream_source.delta.rules.layout import ENTRY_SEQUENCE, SEQUENCE, Layout
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream.kv.codec import NO_CODEC
from nats_stream_source.options import CONNECTION, connection_settings, parse
from tests.integration.delta.driver.in_process import ARROW, InProcessTable, arrow
from tests.integration.delta.kv_bucket import Bucket, Reconciled
from tests.integration.delta.merge_model import Entry, Frame, Merge, both_modes, every_engine
from tests.integration.delta.table_content import live, stored
from tests.support.nats import buckets

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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["remove", "mark", "history"])
def test_random_interleavings_with_revisions_that_vanish(
    table: Path, shared_server: NatsServer, kind: str, seed: int
) -> None:
    """Newest revisions vanish, so that older ones are current again, also of unread entries."""
    rng = random.Random(seed)
    bucket = Bucket(shared_server.url, f"vanish-{kind}-{seed}").create(deny_delete=False)
    settings = connection_settings(parse({"servers": bucket.url}, CONNECTION))
    merged = InProcessTable(table, "mark" if kind == "mark" else "remove")
    replaced = 0

    def merge(entries: Sequence[Entry]) -> None:
        if kind == "history":
            columns = ARROW.names
            layout = Layout(2, ("bucket", "key"), ENTRY_SEQUENCE, (SEQUENCE,), "remove", True)
            shape = EventShape(ARROW, layout, ("value",), frozenset(columns), computed=True)
            merged.merge_events(arrow(entries), shape)
        else:
            merged.merge(*entries)

    def reconciled() -> int:
        result = compare_with_bucket(
            merged.engine, "fleet", bucket.name, settings, NO_CODEC, merged.deletes
        )
        assert not result.changed
        return result.replaced

    unread: list[Entry] = []
    for step in range(8):
        for number in range(rng.randrange(1, 6)):
            written = (rng.choice("abcd"), rng.choice(["PUT", "PUT", "PUT", "DEL"]))
            unread += bucket.write(written, value=f"{step}.{number}".encode())
        for key in rng.sample("abcd", 2):
            last = bucket.last(key)
            if last is not None and not last.get("hdrs"):
                request = {"seq": last["seq"]}
                buckets.api(bucket.url, f"STREAM.MSG.DELETE.KV_{bucket.name}", request)
        read = rng.randrange(len(unread) + 1)
        merge(unread[:read])
        unread = unread[read:]
        replaced += reconciled() if table.exists() else 0
    merge(unread)
    replaced += reconciled()
    assert replaced
    assert reconciled() == 0
    last_of = {key: bucket.last(key) for key in "abcd"}
    current = {
        key: (last["seq"], base64.b64decode(last["data"]))
        for key, last in last_of.items()
        if last is not None and not last.get("hdrs")
    }
    rows = [row for row in stored(table) if not (row.get("deleted") or row.get("__END_AT"))]
    assert {row["key"]: (row["revision"], row["value"]) for row in rows} == current
    assert len(rows) == len(current)
    if kind == "history":
        bounds = sorted(
            (
                row["key"],
                row["__START_AT"]["revision"],
                row["__END_AT"] and row["__END_AT"]["revision"],
            )
            for row in stored(table)
        )
        for (key, _, end), (following, start, _) in itertools.pairwise(bounds):
            assert key != following or (end is not None and end <= start)
