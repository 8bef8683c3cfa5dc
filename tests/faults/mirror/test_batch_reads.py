"""Batches beside a partial mirror that responds to Direct Gets, and batches of a lagging mirror."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.mirror.partial_mirror import (
    ENTRIES,
    PARTS,
    answers_with_a_part,
    asked_a_mirror,
    check_balance,
    write_with_holes,
)
from tests.support.nats.topology import HubAndLeaf, hub_and_leaf, make_mirror, wait_for_seq
from tests.support.proxy.fault_proxy import Proxy
from tests.support.query_driver.batch import (
    BATCHES,
    batch_options,
    batch_reader,
    read_sorted,
    recorded_kind,
    tasks_of,
)
from tests.support.recorded_stream import RecordedStream


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("what", BATCHES)
def test_partial_mirror_serves_direct_get(shared_server: NatsServer, what: str, part: str) -> None:
    """A range of several tasks requests ranks, and those of the mirror are too low.

    "now" and "as of" are one task each: they request no rank and send no Direct Get, so the mirror
    has no effect.
    """
    recorded = RecordedStream(recorded_kind(what), shared_server.url).create(max_msgs_per_subject=1)
    junk = write_with_holes(recorded)
    answers_with_a_part(recorded, PARTS[part])
    filters: list[dict[str, str]] = [{}]
    if what in ("all", "stream"):
        filters.append({"keys": "*"} if what == "all" else {"filterSubjects": f"{recorded.name}.*"})
    for narrow in filters:
        with Proxy(shared_server.port) as proxy:
            options = {**batch_options(recorded, what), **narrow}
            tasks = [one.splits[0].split for one in tasks_of(batch_reader(proxy.url, **options))]
            if what in ("all", "stream"):
                assert asked_a_mirror(proxy)
            rows = read_sorted(proxy.url, options)
            assert what in ("all", "stream") or not proxy.asked("$JS.API.DIRECT.GET.")
        recorded.check(rows, lost=[junk] if narrow else [])
        assert len(rows) == ENTRIES + (not narrow)
        if what in ("all", "stream"):
            check_balance([(task.range.start, task.range.end) for task in tasks], rows)


@pytest.fixture(scope="module")
def domains() -> Iterator[HubAndLeaf]:
    with hub_and_leaf() as both:
        yield both


@pytest.mark.parametrize("what", BATCHES)
def test_lagging_mirror_serves_batch(domains: HubAndLeaf, what: str) -> None:
    """A batch reads all that the mirror has; a later batch reads the rest."""
    recorded = RecordedStream(recorded_kind(what), domains.hub.url).create()
    recorded.write(500)
    more = {"max_msgs_per_subject": 64} if recorded.is_kv else {}
    make_mirror(domains.leaf.url, recorded.stream, recorded.stream, source_domain="hub", **more)
    had = batch_options(recorded, what)
    domains.line.hold()
    try:
        recorded.write(500)
        rows = read_sorted(domains.leaf.url, had)
        assert recorded.state(domains.leaf.url)["last_seq"] == 500
    finally:
        domains.line.release()
    recorded.check(rows, through=500)
    assert len(rows) == 500
    wait_for_seq(domains.leaf.url, recorded.stream, recorded.last)
    recorded.check(read_sorted(domains.leaf.url, batch_options(recorded, what)))
