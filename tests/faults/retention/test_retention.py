"""Streams that lose their oldest messages while a query reads them.

The error names what aged out before it was read; what aged out afterwards, or never matched, is not
a loss.
"""

from __future__ import annotations

import pytest

from benchmarks.support.raw_connection import fill
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from tests.support.nats.buckets import api, publish, put
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import When
from tests.support.recorded_stream import KINDS_IN_TURN, RecordedStream, expire, loss_warnings

ACCEPT = {"failOnDataLoss": "false"}
KEPT = 500
"""Messages that a stream of these tests keeps."""


def create(kind: str, server: NatsServer) -> RecordedStream:
    # A bucket refuses what is too much, where it is made as ADR-8 has it.
    return RecordedStream(kind, server.url).create(max_msgs=KEPT, discard="old")


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_retention_overtakes_split(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """The consumer is lost at 200; when it is rebuilt, all up to 350 has expired."""
    for options in ({}, ACCEPT):
        recorded = create(kind, shared_server)
        recorded.write(KEPT, size=1000)

        def overtake(recorded: RecordedStream = recorded) -> None:
            recorded.write(350)

        fault = When(200, overtake)
        caplog.clear()
        proxied = Proxy(shared_server.port, fault)
        with proxied as proxy, recorded.query(proxy.url, **options) as query:
            assert query.plan()
            assert query.logged is not None
            assert query.logged["stream_seq"] == KEPT
            if not options:
                with pytest.raises(DataLossError, match=r"\b200 to 350 aged out"):
                    query.read()
                continue
            query.read()
            assert any("200 to 350 aged out" in text for text in loss_warnings(caplog))
            query.drain()
        assert fault.consumer
        assert recorded.state()["first_seq"] == 351
        recorded.check(query.rows, lost=range(200, 351))


@pytest.mark.parametrize("more", [250, 400])
@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_retention_overtakes_between_splits(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str, more: int
) -> None:
    """Of three splits the first was read when ``more`` are written, and as many age out.

    They are all of the first one, which is not a loss, and of the second some, or all and some of
    the third: each split reports its own part.
    """
    for options in ({}, ACCEPT):
        recorded = create(kind, shared_server)
        recorded.write(KEPT)
        caplog.clear()
        with recorded.query(minPartitions="3", **options) as query:
            assert query.plan()
            ends = [split.range.end for split in query.splits]
            assert len(ends) == 3
            assert ends[0] < 250 < ends[1] < 400 < ends[2] == KEPT

            def overtake(
                rows: int, recorded: RecordedStream = recorded, first: int = ends[0]
            ) -> None:
                if rows == first:
                    recorded.write(more)

            told = [
                f" {split.range.start + 1} to {min(split.range.end, more)} aged out"
                for split in query.splits[1:]
                if split.range.start < more
            ]
            if options:
                query.read(overtake)
                query.drain()
            else:
                with pytest.raises(DataLossError, match=told[0]):
                    query.read(overtake)
        assert recorded.state()["first_seq"] == more + 1
        if options:
            recorded.check(query.rows, lost=range(ends[0] + 1, more + 1))
            assert len(query.rows) == ends[0] + KEPT
            assert len(loss_warnings(caplog)) == len(told)
            assert all(part in text for part, text in zip(told, loss_warnings(caplog), strict=True))


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_retention_follows_close_behind(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """What ages out after it was sent is not lost, though the stream now begins in the range."""
    recorded = create(kind, shared_server)
    recorded.write(KEPT)
    proxied = Proxy(shared_server.port, When(KEPT, lambda: recorded.write(300), lose=False))
    with proxied as proxy, recorded.query(proxy.url) as query:
        assert query.plan()
        query.read()
        assert recorded.state()["first_seq"] == 301
        query.drain()
    recorded.check(query.rows)
    assert loss_warnings(caplog) == []


# -- age ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_messages_that_expire(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Without markers. What was read is not a loss; what was not, is one where every one counts."""
    recorded = RecordedStream(kind, shared_server.url).create(duplicate_window=100_000_000)
    recorded.write(100)
    with recorded.query() as query:
        query.drain()
        expire(recorded)
        assert loss_warnings(caplog) == []
        recorded.write(50)
        query.until(recorded.last)
        assert loss_warnings(caplog) == []
        recorded.check(query.rows)
        recorded.write(50)
    expire(recorded)
    # The last 50 were not seen by anybody.
    recorded.write(1)
    gone = range(151, 201)
    if kind != "kv current":
        lost = pytest.raises(DataLossError, match=r"\b151 to 200 aged out")
        with recorded.query(offsets=query.offsets) as refused, lost:
            refused.plan()
    with recorded.query(offsets=query.offsets, **ACCEPT) as second:
        second.drain()
    recorded.check(query.rows + second.rows, lost=gone)


def test_bucket_with_silent_removals_warns_at_start(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that expires without a marker has no row for that, so the query logs a warning."""
    recorded = RecordedStream("kv current", shared_server.url).create(max_age=60_000_000_000)
    put(recorded.url, recorded.name, "a", b"1")
    with recorded.query() as query:
        query.drain()
    assert any("removed without a marker" in one.getMessage() for one in caplog.records)


def test_purge_of_one_subject(shared_server: NatsServer) -> None:
    """Through the API, without a marker: holes are not a loss, the beginning has not moved."""
    recorded = RecordedStream("stream", shared_server.url).create()
    recorded.write(100)
    with recorded.query() as query:
        assert query.plan()
        for key in ("k50", "k70"):
            api(recorded.url, f"STREAM.PURGE.{recorded.stream}", {"filter": recorded.prefix + key})
        query.read()
    recorded.check(query.rows, lost=[51, 71])
    assert len(query.rows) == 98


# -- a message that matches once in many -----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_rare_match_keeps_offset_moving(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """The offset follows the stream with empty micro-batches now and then: no false loss."""
    recorded = create(kind, shared_server)
    subject = f"{recorded.prefix}rare"

    def rare() -> int:
        return publish(recorded.url, [(subject, b"v", None)])[0]

    narrow = {"filterSubjects": subject} if kind == "stream" else {"keys": "rare"}
    with recorded.query(**narrow) as query:
        wanted = [rare()]
        query.drain()
        micro_batches = len(query.offsets)
        for _ in range(8):
            # Less than the stream keeps between two looks of a running query.
            recorded.write(KEPT * 4 // 5)
            query.drain()
            assert query.seq >= recorded.state()["first_seq"] - 1
        assert recorded.state()["first_seq"] > wanted[0] + 2500
        empty = len(query.offsets) - micro_batches
        wanted.append(rare())
        query.until(wanted[-1])
    assert [row.seq for row in query.rows] == wanted
    assert 0 < empty < 20
    assert loss_warnings(caplog) == []


ROUND = 20_000
"""Messages between two looks; a stream keeps twice as many."""


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        ("kv", 4),
        pytest.param("kv current", 4, marks=pytest.mark.faults),
        pytest.param("stream", 4, marks=pytest.mark.faults),
        pytest.param("kv", 50, marks=pytest.mark.faults),
        pytest.param("stream", 50, marks=pytest.mark.faults),
    ],
)
def test_single_match_in_million_messages_while_retention_moves(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str, rounds: int
) -> None:
    """Of a bucket, too, though every key that is written is one that no filter matches."""
    recorded = RecordedStream(kind, shared_server.url).create(
        max_msgs=2 * ROUND, discard="old", storage="memory"
    )
    # More keys than the bucket keeps, or their history would be what moves on.
    noise = [(f"{recorded.prefix}noise.{i}", None, b"") for i in range(3 * ROUND)]
    rare = [(f"{recorded.prefix}rare", b"1", None)]
    narrow = {"filterSubjects": rare[0][0]} if kind == "stream" else {"keys": "rare"}
    with recorded.query(**narrow) as query:
        wanted = publish(recorded.url, rare)
        for i in range(rounds):
            part = i % 3 * ROUND
            fill(shared_server.port, noise[part : part + ROUND])
            query.drain()
        assert recorded.state()["first_seq"] > (rounds - 2) * ROUND
        wanted += publish(recorded.url, rare)
        query.until(wanted[-1])
    assert [row.seq for row in query.rows] == wanted
    assert loss_warnings(caplog) == []
