"""Keys that are written again just as their older entries expire: the server takes that back.

The leader decides on the marker of an expired entry while the new write is on its way to the
followers. The write is stored and acknowledged first, then the marker removes all that the key has.
Such a write is lost; the query has to end with what the bucket has.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.cluster.replica_state import create_replicated
from tests.support.nats import buckets
from tests.support.nats.cluster import Cluster, paused
from tests.support.oracle.row_check import Marker, Row
from tests.support.recorded_stream import QueryDriver, RecordedStream
from tests.support.wait import wait_until

pytestmark = pytest.mark.faults

KEYS, OTHERS = 50, 50
TTL = 30  # seconds, of entries and markers: nothing is taken back where the markers live longer
MARKERS = {"allow_msg_ttl": True, "subject_delete_marker_ttl": TTL * 10**9}
# Seconds before and after an entry expires in which the followers stand still: more, and the leader
# gives up or they elect another one.
_BEFORE, _AFTER = 1.0, 2.5
_MOST_ATTEMPTS = 5


def put(
    recorded: RecordedStream,
    keys: Sequence[str],
    url: str | None = None,
    headers: dict[str, str] | None = None,
) -> list[int]:
    """Write the next values to these keys; the sequences."""
    values = [value for _, value in recorded.messages(len(keys))]
    return recorded.put(list(zip(keys, values, strict=True)), url, headers)


def table_of(rows: Sequence[Row]) -> dict[str, tuple[int, bytes | None]]:
    """What a table of current values holds after these rows: by key, revision and value."""
    last = {row.key: row for row in rows}
    return {key: (row.seq, row.value) for key, row in last.items() if row.operation == "PUT"}


def bucket_of(recorded: RecordedStream, keys: Sequence[str]) -> dict[str, tuple[int, bytes | None]]:
    """What the bucket has of these keys, likewise."""
    found: dict[str, tuple[int, bytes | None]] = {}
    for key in keys:
        request = {"last_by_subj": recorded.prefix + key}
        try:
            message = buckets.api(recorded.url, f"STREAM.MSG.GET.{recorded.stream}", request)[
                "message"
            ]
        except RuntimeError as error:
            if "no message found" not in str(error):
                raise
            continue  # the marker has expired, too
        if b"Nats-Marker-Reason: MaxAge" not in base64.b64decode(message.get("hdrs", "")):
            found[key] = message["seq"], base64.b64decode(message["data"])
    return found


def lose_writes(
    cluster: Cluster, recorded: RecordedStream, query: QueryDriver, keys: Sequence[str]
) -> list[int]:
    """Write to these keys as their entries expire, which were read; what the server took back."""
    leader = cluster.leader_of(recorded.stream)
    put(recorded, keys, leader.url, {"Nats-TTL": f"{TTL}s"})
    expiry = time.monotonic() + TTL
    query.until(recorded.last)
    wait_until(lambda: time.monotonic() > expiry - _BEFORE, "a moment before they expire")
    with ThreadPoolExecutor(1) as pool:
        with paused(cluster.followers_of(recorded.stream)):
            writing = pool.submit(put, recorded, keys, leader.url)
            wait_until(lambda: time.monotonic() > expiry + _AFTER, "they expire")
            assert not writing.done(), "acknowledged without a majority"
        acknowledged = writing.result()
    wait_until(lambda: recorded.state()["last_seq"] >= acknowledged[-1] + len(keys), "markers")
    return [] if bucket_of(recorded, keys) else acknowledged


@pytest.mark.parametrize("kind", ["kv", "kv current"])
def test_message_acknowledged_and_removed_by_marker(cluster: Cluster, kind: str) -> None:
    """The marker becomes a row, such a write does not: a table equals the bucket."""
    keys = [f"ttl{number}" for number in range(KEYS)]
    for _ in range(_MOST_ATTEMPTS):
        recorded = create_replicated(cluster, kind, OTHERS, **MARKERS)
        with recorded.query() as first:
            lost = lose_writes(cluster, recorded, first, keys)
            first.drain()
        if lost:
            break
    else:
        raise AssertionError("each time the writes were there before it was decided on markers")
    recorded.attempted.update((key, Marker.PURGE) for key in keys)
    recorded.check(first.rows, lost=lost)
    markers = [row.key for row in first.rows if row.seq > lost[-1] and row.operation == "PURGE"]
    assert sorted(markers) == sorted(keys)

    every = [*keys, *(key for key, _ in recorded.acknowledged.values() if key not in keys)]
    assert table_of(first.rows) == bucket_of(recorded, every)
    with recorded.query() as anew:
        anew.drain()
    assert table_of(anew.rows) == bucket_of(recorded, every)

    put(recorded, keys[::2])
    with recorded.query(offsets=first.offsets) as second:
        second.until(recorded.last)
    rows = first.rows + second.rows
    recorded.check(rows, lost=lost)
    assert table_of(rows) == bucket_of(recorded, every)
