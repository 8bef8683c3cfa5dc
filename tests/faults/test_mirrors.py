"""Mirrors: one that has a part and answers Direct Gets, one that lags, one whose clock jumps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from buckets import api, with_client
from nats.aio.client import Client
from topology import HubAndLeaf, Line, hub_and_leaf, make_mirror, wait_for_seq, wait_until

from faults.trial import KINDS_IN_TURN, Row, Trial
from nats_stream_source.embedded import NatsServer


def answered_by(url: str, stream: str, subject: str) -> str | None:
    """``Nats-Stream`` of a Direct Get for the last message of ``subject``; None for a 404."""

    async def work(client: Client) -> str | None:
        request = json.dumps({"last_by_subj": subject}).encode()
        message = await client.request(f"$JS.API.DIRECT.GET.{stream}", request, timeout=5)
        return (message.headers or {}).get("Nats-Stream")

    return with_client(url, work)


@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_a_partial_mirror_that_answers_direct_gets(shared_server: NatsServer, kind: str) -> None:
    """It has a tenth, and answers for all. Limits, filters and splits ask for ranks."""
    trial = Trial(kind, shared_server.url).create()
    trial.write(2000)
    api(
        trial.url,
        f"STREAM.CREATE.{trial.name}-part",
        {
            "name": f"{trial.name}-part",
            "mirror": {"name": trial.stream, "opt_start_seq": 1801},
            "mirror_direct": True,
            "allow_direct": True,
        },
    )
    # It joins in when it has caught up; then one in two answers is its own, and wrong.
    subject = f"{trial.prefix}k0"
    wait_until(
        "it answers",
        lambda: answered_by(trial.url, trial.stream, subject) is None,
        deadline=120,
    )

    filters = {"filterSubjects" if kind == "stream" else "keys": _pattern(trial)}
    for options in (
        {"maxRowsPerTrigger": "300"},
        {"maxRowsPerTrigger": "300", **filters},
        {"minPartitions": "4"},
    ):
        with trial.reading(**options) as reading:
            reading.until(trial.last)
        trial.check(reading.rows)


def _pattern(trial: Trial) -> str:
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
