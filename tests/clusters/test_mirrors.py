"""Mirrors: one that has a part and answers Direct Gets, one that lags, one whose clock jumps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from buckets import api
from faults.proxy import Proxy
from faults.trial import KINDS_IN_TURN, Row, Trial
from topology import HubAndLeaf, Line, hub_and_leaf, make_mirror, wait_for_seq

from clusters.mirrored import (
    PARTS,
    answers_with_a_part,
    asked_a_mirror,
    check_balance,
    give_time_for_ranks,
    write_with_holes,
)
from nats_stream_source.embedded import NatsServer


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
    trial = Trial(kind, shared_server.url).create(max_msgs_per_subject=1)
    junk = write_with_holes(trial)
    answers_with_a_part(trial, PARTS[part])

    limit = 300
    narrow = {"filterSubjects" if kind == "stream" else "keys": _pattern(trial)}
    for filters in ({}, narrow):
        lost = [junk] if filters else []
        proxied = Proxy(shared_server.port)
        with (
            proxied as proxy,
            trial.reading(proxy.url, maxRowsPerTrigger=str(limit), **filters) as reading,
        ):
            sizes: list[int] = []
            while reading.seq < junk - bool(filters):
                assert reading.plan()
                sizes.append(len(reading.read()))
            assert asked_a_mirror(proxy)
        trial.check(reading.rows, lost=lost)
        assert max(sizes) <= limit
        assert min(sizes[:-1]) >= 0.9 * limit

        with (
            Proxy(shared_server.port) as proxy,
            trial.reading(proxy.url, minPartitions="4", **filters) as reading,
        ):
            reading.until(junk - bool(filters))
            assert asked_a_mirror(proxy)
        trial.check(reading.rows, lost=lost)
        check_balance([(split.start, split.end) for split in reading.splits], reading.rows)


def _pattern(trial: Trial) -> str:
    """It does not match :data:`JUNK`."""
    return f"{trial.name}.*" if trial.kind == "stream" else "*"


@pytest.fixture(scope="module")
def domains() -> Iterator[HubAndLeaf]:
    with hub_and_leaf() as both:
        yield both


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_a_mirror_that_is_behind(domains: HubAndLeaf, kind: str) -> None:
    """What it has is read; the rest when it comes, and none of it is a loss."""
    trial = Trial(kind, domains.hub.url).create()
    trial.write(500)
    more = {"max_msgs_per_subject": 64} if trial.is_kv else {}
    make_mirror(domains.leaf.url, trial.stream, trial.stream, source_domain="hub", **more)
    with trial.reading(domains.leaf.url) as reading:
        reading.until(500)
        domains.line.hold()
        try:
            trial.write(500)
            assert not reading.plan()
            assert trial.state(domains.leaf.url)["last_seq"] == 500
        finally:
            domains.line.release()
        reading.until(trial.last)
    trial.check(reading.rows)


# -- clocks that jump -----------------------------------------------------------------------------


_ACK = re.compile(rb"(\$JS\.ACK\.[^ ]*\.(\d+)\.\d+\.)(\d{19})(?=\.\d+[@ ])")
_HOUR, _DAY = 3600 * 10**9, 86_400 * 10**9


def jumped(seq: int) -> int:
    """By how many nanoseconds the clock is wrong when ``seq`` is stored."""
    return {0: 0, 1: -_HOUR, 2: _DAY, 3: -_DAY}[seq // 100 % 4]


class Jumps(Line):
    """A mirror keeps its upstream's times, which are in the ACK subjects: they jump on the way.

    So a real server has a stream whose clock was set back and forth.
    """

    def changed(self, data: bytes) -> bytes:
        def set_clock(found: re.Match[bytes]) -> bytes:
            return found[1] + b"%d" % (int(found[3]) + jumped(int(found[2])))

        return _ACK.sub(set_clock, data)


@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_clocks_that_jump(kind: str) -> None:
    """Sequences decide, never times: nothing is lost, nothing twice, and no loss is seen."""
    with hub_and_leaf(line=Jumps) as both:
        trial = Trial(kind, both.hub.url).create()
        trial.write(500)
        more = {"max_msgs_per_subject": 64} if trial.is_kv else {}
        make_mirror(both.leaf.url, trial.stream, trial.stream, source_domain="hub", **more)
        times = [_stored(both.leaf.url, trial.stream, seq) for seq in (99, 100, 200, 300)]
        assert times[1] < times[0] - timedelta(minutes=50)
        assert times[2] > times[0] + timedelta(hours=20)
        assert times[3] < times[0] - timedelta(hours=20)

        rows: list[Row] = []
        offsets: list[dict[str, Any]] = []
        for _ in range(100):
            # A restart after each micro-batch, at checkpoints whose times go back and forth.
            if offsets and offsets[-1]["stream_seq"] == trial.last:
                break
            with trial.reading(both.leaf.url, offsets, maxRowsPerTrigger="50") as reading:
                if reading.plan():
                    reading.read()
            rows += reading.rows
            offsets = reading.offsets
        trial.check(rows)
        trial.write(100)
        wait_for_seq(both.leaf.url, trial.stream, trial.last)
        with trial.reading(both.leaf.url, offsets) as reading:
            reading.until(trial.last)
        trial.check(rows + reading.rows)


def _stored(url: str, stream: str, seq: int) -> datetime:
    answer = api(url, f"STREAM.MSG.GET.{stream}", {"seq": seq})
    return datetime.fromisoformat(answer["message"]["time"][:19] + "+00:00")
