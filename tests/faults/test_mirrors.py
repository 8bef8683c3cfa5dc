"""Mirrors: one that has a part and answers Direct Gets, one that lags, one whose clock jumps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from buckets import api, publish, with_client
from nats.aio.client import Client
from topology import HubAndLeaf, Line, hub_and_leaf, make_mirror, wait_for_seq, wait_until

from faults.proxy import Proxy
from faults.trial import DEADLINE, KINDS_IN_TURN, Row, Trial
from nats_stream_source.embedded import NatsServer
from nats_stream_source.source import cuts


def answered_by(url: str, stream: str, subject: str) -> str | None:
    """``Nats-Stream`` of a Direct Get for the last message of ``subject``; None for a 404."""

    async def work(client: Client) -> str | None:
        request = json.dumps({"last_by_subj": subject}).encode()
        message = await client.request(f"$JS.API.DIRECT.GET.{stream}", request, timeout=5)
        return (message.headers or {}).get("Nats-Stream")

    return with_client(url, work)


ENTRIES = 1000
"""Written with as many holes between them, see :func:`write_with_holes`."""
JUNK = "junk.x"
PARTS = {"a tenth": 2 * ENTRIES - 199, "the last, which matches no filter": 2 * ENTRIES}
"""From which sequence on a partial mirror has the stream."""


def write_with_holes(trial: Trial) -> int:
    """Write :data:`ENTRIES`, and after each the same key again; the sequence of its last message.

    Without holes sequences do for rows, and no rank is asked.
    """
    written = trial.messages(ENTRIES)
    both = [pair for entry in written for pair in (entry, (JUNK, b"junk"))]
    sequences = publish(trial.url, [(trial.prefix + key, value, None) for key, value in both])
    trial.acknowledged.update(zip(sequences[::2], written, strict=True))
    trial.acknowledged[sequences[-1]] = both[-1]
    state = trial.state()
    assert (state["messages"], state["last_seq"]) == (ENTRIES + 1, sequences[-1])
    return sequences[-1]


def answers_with_a_part(trial: Trial, first: int) -> None:
    """From now on a mirror that begins at ``first`` answers Direct Gets for the stream, alone.

    Together with the stream it answers one in two, and a test may meet none of those.
    """
    part = {
        "name": f"{trial.name}-part",
        "mirror": {"name": trial.stream, "opt_start_seq": first},
        "mirror_direct": True,
        "allow_direct": True,
    }
    api(trial.url, f"STREAM.CREATE.{part['name']}", part)
    # It joins in when it has caught up.
    subject = f"{trial.prefix}k0"
    wait_until(
        "it answers",
        lambda: answered_by(trial.url, trial.stream, subject) is None,
        deadline=120,
    )
    config = api(trial.url, f"STREAM.INFO.{trial.stream}")["config"]
    api(trial.url, f"STREAM.UPDATE.{trial.stream}", {**config, "allow_direct": False})
    last = f"{trial.prefix}{JUNK}"
    assert {answered_by(trial.url, trial.stream, last) for _ in range(10)} == {part["name"]}


def asked_a_mirror(proxy: Proxy) -> bool:
    """Whether ranks were asked by Direct Get, each answered by a mirror or with 404."""
    asked = len(proxy.asked("$JS.API.DIRECT.GET."))
    answers = [frame for frame in proxy.seen if b"-part\r\n" in frame or b"NATS/1.0 404" in frame]
    return 0 < asked <= len(answers)


def give_time_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine they would be left out."""
    for name in ("_LIMIT_SECONDS", "_BORDER_SECONDS"):
        monkeypatch.setattr(cuts, name, DEADLINE)


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


def check_balance(splits: Sequence[tuple[int, int]], rows: Sequence[Row]) -> None:
    """Four splits have about as many rows each."""
    sizes = [sum(start < row.seq <= end for row in rows) for start, end in splits]
    assert len(sizes) == 4
    assert sum(sizes) == len(rows)
    assert max(sizes) <= 1.25 * len(rows) / 4, sizes


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
