"""Initial values that are superseded or purged before the consumer has delivered them.

The server makes the list when the consumer is created. Where it comes to a message that was
superseded or purged since, it waits for its own next heartbeat, and then moves on by that one: 600
of them would take five minutes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.nats import buckets
from tests.support.recorded_stream import RecordedStream, warnings

COUNT, SIZE = 6000, 5000  # 30 MB: more than the server sends to a reader that pauses
GONE = range(5200, 5800)


def overwrite(recorded: RecordedStream) -> None:
    """Twice: of two messages of a key, the listed one was removed."""
    for value in (b"older", b"newer"):
        buckets.publish(recorded.url, [(f"{recorded.prefix}k{n}", value, None) for n in GONE])


def purge(recorded: RecordedStream) -> None:
    """As TTLs without markers do it."""
    for n in GONE:
        buckets.api(
            recorded.url, f"STREAM.PURGE.{recorded.stream}", {"filter": f"{recorded.prefix}k{n}"}
        )


FAULTS: dict[str, tuple[Callable[[RecordedStream], None], bytes | None]] = {
    "overwritten": (overwrite, b"newer"),
    "purged": (purge, None),
}


@pytest.mark.parametrize("what", FAULTS)
def test_listed_stream_is_deleted(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    fault, then = FAULTS[what]
    recorded = RecordedStream("kv current", shared_server.url).create(history=2)
    recorded.write(COUNT, SIZE)
    injected: list[int] = []

    def once(rows: int) -> None:
        if not injected:
            injected.append(rows)
            fault(recorded)

    with recorded.query() as query:
        assert query.plan()
        (split,) = query.splits
        assert split.range.last_per_subject
        listed = query.read(once)
        query.drain()
    assert injected
    assert injected[0] < GONE.start
    assert len(listed.rows) == COUNT - len(GONE)
    stale = [text for text in warnings(caplog) if "stale list" in text]
    assert 1 <= len(stale) < 5
    seqs = [row.seq for row in query.rows]
    assert sorted(set(seqs)) == seqs
    expected: dict[str, bytes | None] = dict(recorded.acknowledged.values())
    expected.update((f"k{n}", then) for n in GONE)
    latest = {row.key: row.value for row in query.rows}
    assert latest == {key: value for key, value in expected.items() if value is not None}
