"""Mirrors: one that has a part and answers Direct Gets, one that lags."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.mirror.partial_mirror import (
    PARTS,
    answers_with_a_part,
    asked_a_mirror,
    check_balance,
    give_time_for_ranks,
    write_with_holes,
)
from tests.support.nats.topology import HubAndLeaf, hub_and_leaf, make_mirror
from tests.support.proxy.fault_proxy import Proxy
from tests.support.workload import KINDS_IN_TURN, Workload


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_a_partial_mirror_that_answers_direct_gets(
    shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch, kind: str, part: str
) -> None:
    """Limits and splits ask for ranks; the mirror counts too few, and nobody believes it.

    The stream keeps one message a subject: if it kept more, current values would be one micro-batch
    without a rank.
    """
    give_time_for_ranks(monkeypatch)
    workload = Workload(kind, shared_server.url).create(max_msgs_per_subject=1)
    junk = write_with_holes(workload)
    answers_with_a_part(workload, PARTS[part])

    limit = 300
    narrow = {"filterSubjects" if kind == "stream" else "keys": _pattern(workload)}
    for filters in ({}, narrow):
        lost = [junk] if filters else []
        proxied = Proxy(shared_server.port)
        with (
            proxied as proxy,
            workload.reading(proxy.url, maxRowsPerTrigger=str(limit), **filters) as reading,
        ):
            sizes: list[int] = []
            while reading.seq < junk - bool(filters):
                assert reading.plan()
                sizes.append(len(reading.read()))
            assert asked_a_mirror(proxy)
        workload.check(reading.rows, lost=lost)
        assert max(sizes) <= limit
        assert min(sizes[:-1]) >= 0.9 * limit

        with (
            Proxy(shared_server.port) as proxy,
            workload.reading(proxy.url, minPartitions="4", **filters) as reading,
        ):
            reading.until(junk - bool(filters))
            assert asked_a_mirror(proxy)
        workload.check(reading.rows, lost=lost)
        check_balance([(split.start, split.end) for split in reading.splits], reading.rows)


def _pattern(workload: Workload) -> str:
    """It does not match :data:`JUNK`."""
    return f"{workload.name}.*" if workload.kind == "stream" else "*"


@pytest.fixture(scope="module")
def domains() -> Iterator[HubAndLeaf]:
    with hub_and_leaf() as both:
        yield both


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_a_mirror_that_is_behind(domains: HubAndLeaf, kind: str) -> None:
    """What it has is read; the rest when it comes, and none of it is a loss."""
    workload = Workload(kind, domains.hub.url).create()
    workload.write(500)
    more = {"max_msgs_per_subject": 64} if workload.is_kv else {}
    make_mirror(domains.leaf.url, workload.stream, workload.stream, source_domain="hub", **more)
    with workload.reading(domains.leaf.url) as reading:
        reading.until(500)
        domains.line.hold()
        try:
            workload.write(500)
            assert not reading.plan()
            assert workload.state(domains.leaf.url)["last_seq"] == 500
        finally:
            domains.line.release()
        reading.until(workload.last)
    workload.check(reading.rows)
