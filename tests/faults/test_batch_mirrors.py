"""Batches: beside a mirror that has a part and answers Direct Gets, and of one that is behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from buckets import api
from topology import HubAndLeaf, hub_and_leaf, make_mirror, wait_for_seq, wait_until

from faults.batches import BATCHES, kind_of, options_of, read
from faults.test_mirrors import answered_by
from faults.trial import Trial
from nats_stream_source.embedded import NatsServer


@pytest.mark.parametrize("what", BATCHES)
def test_a_partial_mirror_that_answers_direct_gets(shared_server: NatsServer, what: str) -> None:
    """It has a tenth, and answers for all."""
    trial = Trial(kind_of(what), shared_server.url).create()
    trial.write(2000)
    part = {
        "name": f"{trial.name}-part",
        "mirror": {"name": trial.stream, "opt_start_seq": 1801},
        "mirror_direct": True,
        "allow_direct": True,
    }
    api(trial.url, f"STREAM.CREATE.{part['name']}", part)
    subject = f"{trial.prefix}k0"
    wait_until("it answers", lambda: answered_by(trial.url, trial.stream, subject) is None)
    for _ in range(5):
        rows = read(trial.url, options_of(trial, what))
        trial.check(rows)
        assert len(rows) == 2000


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
