"""A partial mirror that responds to Direct Gets, and a mirror that lags."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.mirror.partial_mirror import (
    PARTS,
    answers_with_a_part,
    asked_a_mirror,
    check_balance,
    write_with_holes,
)
from tests.support.nats.topology import HubAndLeaf, hub_and_leaf, make_mirror
from tests.support.proxy.fault_proxy import Proxy
from tests.support.recorded_stream import KINDS_IN_TURN, RecordedStream


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_partial_mirror_serves_direct_get(shared_server: NatsServer, kind: str, part: str) -> None:
    """Limits and splits request ranks; the mirror counts too few, and its count is not used.

    The stream keeps one message a subject: if it kept more, current values would be one micro-batch
    without a rank.
    """
    recorded = RecordedStream(kind, shared_server.url).create(max_msgs_per_subject=1)
    junk = write_with_holes(recorded)
    answers_with_a_part(recorded, PARTS[part])

    limit = 300
    narrow = {"filterSubjects" if kind == "stream" else "keys": _pattern(recorded)}
    for filters in ({}, narrow):
        lost = [junk] if filters else []
        proxied = Proxy(shared_server.port)
        with (
            proxied as proxy,
            recorded.query(proxy.url, maxRowsPerTrigger=str(limit), **filters) as query,
        ):
            sizes: list[int] = []
            while query.seq < junk - bool(filters):
                assert query.plan()
                sizes.append(len(query.read().rows))
            assert asked_a_mirror(proxy)
        recorded.check(query.rows, lost=lost)
        assert max(sizes) <= limit
        assert min(sizes[:-1]) >= limit / 2

        with (
            Proxy(shared_server.port) as proxy,
            recorded.query(proxy.url, minPartitions="4", **filters) as query,
        ):
            query.until(junk - bool(filters))
            assert asked_a_mirror(proxy)
        recorded.check(query.rows, lost=lost)
        check_balance([(split.range.start, split.range.end) for split in query.splits], query.rows)


def _pattern(recorded: RecordedStream) -> str:
    """It does not match :data:`JUNK`."""
    return f"{recorded.name}.*" if recorded.kind == "stream" else "*"


@pytest.fixture(scope="module")
def domains() -> Iterator[HubAndLeaf]:
    with hub_and_leaf() as both:
        yield both


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_lagging_mirror_serves_query(domains: HubAndLeaf, kind: str) -> None:
    """The messages of the mirror are read; the rest when they arrive, and none of it is a loss."""
    recorded = RecordedStream(kind, domains.hub.url).create()
    recorded.write(500)
    more = {"max_msgs_per_subject": 64} if recorded.is_kv else {}
    make_mirror(domains.leaf.url, recorded.stream, recorded.stream, source_domain="hub", **more)
    with recorded.query(domains.leaf.url) as query:
        query.until(500)
        domains.line.hold()
        try:
            recorded.write(500)
            assert not query.plan()
            assert recorded.state(domains.leaf.url)["last_seq"] == 500
        finally:
            domains.line.release()
        query.until(recorded.last)
    recorded.check(query.rows)
