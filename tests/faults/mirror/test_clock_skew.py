"""Clocks that jump by an hour or a day, where times decide: batch reads and beginnings.

And where they do not, but might: checkpoints of a bucket that keeps one revision of a key. The
times are those of a mirror, changed on the way (:class:`ClockSkew`), so that a real server has a
stream whose clock was set to and fro.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from nats_stream_source.errors import OptionError
from nats_stream_source.spark.runner import close_cached_runners
from tests.support.nats.buckets import api, put_many
from tests.support.nats.topology import HubAndLeaf, Line, hub_and_leaf, wait_for_seq
from tests.support.query_driver.batch import read_batch
from tests.support.recorded_stream import KINDS_IN_TURN, RecordedStream, Row

COUNT, KEYS = 600, 40

_ACK = re.compile(rb"(\$JS\.ACK\.[^ ]*\.(\d+)\.\d+\.)(\d{19})(?=\.\d+[@ ])")
_HOUR, _DAY = 3600 * 10**9, 86_400 * 10**9


def wrong_by(seq: int) -> int:
    """By how many nanoseconds the clock is wrong when ``seq`` is stored."""
    return {0: 0, 1: -_HOUR, 2: _DAY, 3: -_DAY}[seq // 100 % 4]


class ClockSkew(Line):
    """A mirror keeps its upstream's times, which are in the ACK subjects: they jump on the way."""

    def changed(self, data: bytes) -> bytes:
        def set_clock(found: re.Match[bytes]) -> bytes:
            return found[1] + b"%d" % (int(found[3]) + wrong_by(int(found[2])))

        return _ACK.sub(set_clock, data)


@pytest.fixture(scope="module")
def domains() -> Iterator[HubAndLeaf]:
    with hub_and_leaf(line=ClockSkew) as both:
        yield both


def test_bucket_with_one_revision_under_clock_skew(domains: HubAndLeaf) -> None:
    """A restart after each micro-batch, at checkpoints whose messages are superseded later."""
    hub, leaf = domains.hub.url, domains.leaf.url
    recorded = RecordedStream("kv current", hub, hot=300).create(history=1)
    recorded.write(COUNT)
    domains.mirror(recorded.stream, history=1)
    done, offsets = [], []
    while not offsets or offsets[-1]["stream_seq"] < recorded.last:
        with recorded.query(leaf, offsets, maxRowsPerTrigger="50") as query:
            assert query.plan()
            query.read()
        done.append(query)
        offsets = query.offsets
        if len(done) in (2, 4):
            recorded.write(COUNT // 2)
            wait_for_seq(leaf, recorded.stream, recorded.last)
    assert len(done) > 5
    times = [offset["time"] for offset in offsets if offset["time"] is not None]
    assert times != sorted(times)
    recorded.check_queries(*done)


@dataclass
class Jumped:
    """A mirror with a history that is whole.

    Attributes:
        times: of the messages, from sequence 1 on.
    """

    url: str
    recorded: RecordedStream
    options: dict[str, str]
    column: str
    times: list[datetime]

    def read(self, **options: str) -> list[dict[str, Any]]:
        return read_batch(self.url, **self.options, **options)

    def meets(self, seq: int, moment: datetime) -> bool:
        """Whether what is earlier than ``moment`` may end at ``seq``: there it becomes later."""
        before = seq == 0 or self.times[seq - 1] < moment
        return before and (seq == len(self.times) or self.times[seq] >= moment)


@pytest.fixture(scope="module", params=["kv", "stream"])
def jumped(request: pytest.FixtureRequest, domains: HubAndLeaf) -> Iterator[Jumped]:
    recorded = RecordedStream(request.param, domains.hub.url).create()
    if recorded.is_kv:
        entries = [(f"k{i % KEYS}", b"%d" % i) for i in range(COUNT)]
        put_many(recorded.url, recorded.name, entries)
    else:
        recorded.write(COUNT)
    domains.mirror(recorded.stream, recorded.history)
    url = domains.leaf.url
    if recorded.is_kv:
        own, column, time = {"bucket": recorded.name}, "revision", "created"
        rows = read_batch(url, **own, includeHistory=True)
    else:
        own, column, time = {"stream": recorded.name}, "sequence", "timestamp"
        rows = read_batch(url, **own)
    assert [row[column] for row in rows] == list(range(1, COUNT + 1))
    times = [row[time] for row in rows]
    backwards = [a - b for a, b in itertools.pairwise(times) if b < a]
    assert len(backwards) > 2
    assert max(backwards) > timedelta(days=1)
    yield Jumped(url, recorded, own, column, times)
    close_cached_runners()


@pytest.fixture(autouse=True)
def runners_closed() -> Iterator[None]:
    yield
    close_cached_runners()


SEQUENCES = (1, 50, 99, 100, 150, 199, 300, 350, 399, 400, 450, 500, 550, 599)
"""The clock is an hour late from 100 on, a day early from 200, late from 300, right from 400."""


def moments(jumped: Jumped) -> list[datetime]:
    """Times that some message has, and times before all and after the last one."""
    now = datetime.now(timezone.utc)
    found = [jumped.times[seq - 1] for seq in SEQUENCES]
    assert all(moment <= now for moment in found)
    return [min(found) - timedelta(hours=1), *found, now]


def without_delta(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without the one column that may differ when they are read again."""
    return [{**row, "delta": None} for row in rows]


@pytest.mark.parametrize("jumped", ["kv"], indirect=True)
def test_as_of_time_under_clock_skew(jumped: Jumped) -> None:
    """The state at a place where times pass that one; the state of a sequence, never a mixture."""
    for moment in moments(jumped):
        rows = without_delta(jumped.read(asOfTime=moment.isoformat()))
        seq = max((row["revision"] for row in rows), default=0)
        assert jumped.meets(seq, moment + timedelta(microseconds=1))
        assert rows == (without_delta(jumped.read(asOfSequence=str(seq))) if seq else [])
        assert len(rows) == min(seq, KEYS)
    ahead = jumped.times[249]
    with pytest.raises(OptionError, match=r"'asOfTime'.*future"):
        jumped.read(asOfTime=ahead.isoformat())


def test_start_time_under_clock_skew(jumped: Jumped) -> None:
    """All that comes after such a place, also what has an earlier time, in its order."""
    more = {"includeHistory": "true"} if jumped.recorded.is_kv else {}
    for moment in moments(jumped):
        rows = jumped.read(startTime=moment.isoformat(), **more)
        seqs = [row[jumped.column] for row in rows]
        assert seqs == list(range(COUNT + 1 - len(seqs), COUNT + 1))
        assert jumped.meets(COUNT - len(seqs), moment)


@pytest.mark.parametrize("jumped", ["stream"], indirect=True)
def test_end_time_under_clock_skew(jumped: Jumped) -> None:
    """All that comes before such a place."""
    for moment in moments(jumped):
        rows = jumped.read(endTime=moment.isoformat())
        assert [row["sequence"] for row in rows] == list(range(1, len(rows) + 1))
        assert jumped.meets(len(rows), moment)


def test_query_start_time_under_clock_skew(jumped: Jumped) -> None:
    """The start is determined once; restarts resume by sequence."""
    for moment in (jumped.times[seq - 1] for seq in (50, 150, 350, 450)):
        options = {"startTime": moment.isoformat(), "maxRowsPerTrigger": "100"}
        seqs: list[int] = []
        offsets: list[dict[str, Any]] = []
        while not offsets or offsets[-1]["stream_seq"] < COUNT:
            with jumped.recorded.query(jumped.url, offsets, **options) as query:
                assert query.plan()
                seqs += [row.seq for row in query.read().rows]
            offsets = query.offsets
        begins = offsets[0]["stream_seq"]
        assert jumped.meets(begins, moment)
        assert seqs == list(range(begins + 1, COUNT + 1))


@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_clocks_that_jump(domains: HubAndLeaf, kind: str) -> None:
    """Sequences decide, never times: nothing is lost, nothing twice, and no loss is seen."""
    leaf = domains.leaf.url
    recorded = RecordedStream(kind, domains.hub.url).create()
    recorded.write(500)
    domains.mirror(recorded.stream, recorded.history)
    times = [_stored(leaf, recorded.stream, seq) for seq in (99, 100, 200, 300)]
    assert times[1] < times[0] - timedelta(minutes=50)
    assert times[2] > times[0] + timedelta(hours=20)
    assert times[3] < times[0] - timedelta(hours=20)

    rows: list[Row] = []
    offsets: list[dict[str, Any]] = []
    for _ in range(100):
        # A restart after each micro-batch, at checkpoints whose times go back and forth.
        if offsets and offsets[-1]["stream_seq"] == recorded.last:
            break
        with recorded.query(leaf, offsets, maxRowsPerTrigger="50") as query:
            if query.plan():
                query.read()
        rows += query.rows
        offsets = query.offsets
    recorded.check(rows)
    recorded.write(100)
    wait_for_seq(leaf, recorded.stream, recorded.last)
    with recorded.query(leaf, offsets) as query:
        query.until(recorded.last)
    recorded.check(rows + query.rows)


def _stored(url: str, stream: str, seq: int) -> datetime:
    answer = api(url, f"STREAM.MSG.GET.{stream}", {"seq": seq})
    return datetime.fromisoformat(answer["message"]["time"][:19] + "+00:00")
