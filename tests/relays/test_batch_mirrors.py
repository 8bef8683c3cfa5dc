"""Batches: beside a mirror that has a part and answers Direct Gets, and of one that is behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from batch_reads import batch_reader, tasks_of
from faults.batches import BATCHES, kind_of, options_of, read
from faults.proxy import Proxy
from faults.trial import Trial
from topology import HubAndLeaf, hub_and_leaf, make_mirror, wait_for_seq

from nats_stream_source.embedded import NatsServer
from relays.mirrored import (
    ENTRIES,
    PARTS,
    answers_with_a_part,
    asked_a_mirror,
    check_balance,
    give_time_for_ranks,
    write_with_holes,
)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("what", BATCHES)
def test_a_partial_mirror_that_answers_direct_gets(
    shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch, what: str, part: str
) -> None:
    """What is cut into several tasks asks for ranks, and the mirror's are too few.

    "now" and "as of" are one task each: they ask for no rank, and send no Direct Get at all, so the
    mirror has no say.
    """
    give_time_for_ranks(monkeypatch)
    trial = Trial(kind_of(what), shared_server.url).create(max_msgs_per_subject=1)
    junk = write_with_holes(trial)
    answers_with_a_part(trial, PARTS[part])
    filters: list[dict[str, str]] = [{}]
    if what in ("all", "stream"):
        filters.append({"keys": "*"} if what == "all" else {"filterSubjects": f"{trial.name}.*"})
    for narrow in filters:
        with Proxy(shared_server.port) as proxy:
            options = {**options_of(trial, what), **narrow}
            tasks = [one.task.plan for one in tasks_of(batch_reader(proxy.url, **options))]
            if what in ("all", "stream"):
                assert asked_a_mirror(proxy)
            rows = read(proxy.url, options)
            assert what in ("all", "stream") or not proxy.asked("$JS.API.DIRECT.GET.")
        trial.check(rows, lost=[junk] if narrow else [])
        assert len(rows) == ENTRIES + (not narrow)
        if what in ("all", "stream"):
            check_balance([(task.start, task.end) for task in tasks], rows)


@pytest.fixture(scope="module")
def domains() -> Iterator[HubAndLeaf]:
    with hub_and_leaf() as both:
        yield both


@pytest.mark.parametrize("what", BATCHES)
def test_a_mirror_that_is_behind(domains: HubAndLeaf, what: str) -> None:
    """What it has is read, all of it; the rest when it has that."""
    trial = Trial(kind_of(what), domains.hub.url).create()
    trial.write(500)
    more = {"max_msgs_per_subject": 64} if trial.is_kv else {}
    make_mirror(domains.leaf.url, trial.stream, trial.stream, source_domain="hub", **more)
    had = options_of(trial, what)
    domains.line.hold()
    try:
        trial.write(500)
        rows = read(domains.leaf.url, had)
        assert trial.state(domains.leaf.url)["last_seq"] == 500
    finally:
        domains.line.release()
    trial.check(rows, through=500)
    assert len(rows) == 500
    wait_for_seq(domains.leaf.url, trial.stream, trial.last)
    trial.check(read(domains.leaf.url, options_of(trial, what)))
