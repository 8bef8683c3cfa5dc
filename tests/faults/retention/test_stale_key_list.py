"""A list of last values that is overtaken: what it has still to deliver goes away meanwhile.

The server makes the list when the consumer is created. Where it comes to a message that was
superseded or purged since, it waits for its own next heartbeat, and then moves on by that one: 600
of them would take five minutes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.nats import buckets
from tests.support.workload import Workload, warnings

COUNT, SIZE = 6000, 5000  # 30 MB: more than the server sends to a reader that pauses
GONE = range(5200, 5800)


def overwrite(workload: Workload) -> None:
    """Twice: of two messages a key, the listed one is gone."""
    for value in (b"older", b"newer"):
        buckets.publish(workload.url, [(f"{workload.prefix}k{n}", value, None) for n in GONE])


def purge(workload: Workload) -> None:
    """As TTLs without markers do it."""
    for n in GONE:
        buckets.api(
            workload.url, f"STREAM.PURGE.{workload.stream}", {"filter": f"{workload.prefix}k{n}"}
        )


HARMS: dict[str, tuple[Callable[[Workload], None], bytes | None]] = {
    "overwritten": (overwrite, b"newer"),
    "purged": (purge, None),
}


@pytest.mark.parametrize("what", HARMS)
def test_what_is_listed_goes_away(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    harm, then = HARMS[what]
    workload = Workload("kv current", shared_server.url).create(history=2)
    workload.write(COUNT, SIZE)
    harmed: list[int] = []

    def once(rows: int) -> None:
        if not harmed:
            harmed.append(rows)
            harm(workload)

    with workload.reading() as reading:
        assert reading.plan()
        (split,) = reading.splits
        assert split.last_per_subject
        listed = reading.read(once)
        reading.drain()
    assert harmed
    assert harmed[0] < GONE.start
    assert len(listed) == COUNT - len(GONE)
    stale = [text for text in warnings(caplog) if "stale list" in text]
    assert 1 <= len(stale) < 5
    seqs = [row.seq for row in reading.rows]
    assert sorted(set(seqs)) == seqs
    expected: dict[str, bytes | None] = dict(workload.acknowledged.values())
    expected.update((f"k{n}", then) for n in GONE)
    latest = {row.key: row.value for row in reading.rows}
    assert latest == {key: value for key, value in expected.items() if value is not None}
