"""A partial mirror that responds to Direct Gets, and a mirror that lags: queries and batches.

Such a mirror responds to Direct Gets as the stream would, from a part of its messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest
from nats.aio.client import Client

from nats_stream_source.embedded import NatsServer
from tests.support.nats.buckets import api, publish, with_client
from tests.support.nats.topology import HubAndLeaf, hub_and_leaf, wait_for_seq
from tests.support.proxy.fault_proxy import Proxy
from tests.support.query_driver.batch import (
    BATCHES,
    batch_options,
    batch_reader,
    read_sorted,
    recorded_kind,
    tasks_of,
)
from tests.support.recorded_stream import KINDS_IN_TURN, RecordedStream, Row
from tests.support.wait import wait_until


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


def write_with_holes(recorded: RecordedStream) -> int:
    """Write :data:`ENTRIES`, and after each the same key again; the sequence of its last message.

    Without holes sequences count rows, and no rank is requested.
    """
    written = recorded.messages(ENTRIES)
    both = [pair for entry in written for pair in (entry, (JUNK, b"junk"))]
    sequences = publish(recorded.url, [(recorded.prefix + key, value, None) for key, value in both])
    recorded.acknowledged.update(zip(sequences[::2], written, strict=True))
    recorded.acknowledged[sequences[-1]] = both[-1]
    state = recorded.state()
    assert (state["messages"], state["last_seq"]) == (ENTRIES + 1, sequences[-1])
    return sequences[-1]


def answers_with_a_part(recorded: RecordedStream, first: int) -> None:
    """From now on only a mirror that begins at ``first`` responds to Direct Gets of the stream.

    Together with the stream it responds to one in two, and a test may see none of those.
    """
    part = {
        "name": f"{recorded.name}-part",
        "mirror": {"name": recorded.stream, "opt_start_seq": first},
        "mirror_direct": True,
        "allow_direct": True,
    }
    api(recorded.url, f"STREAM.CREATE.{part['name']}", part)
    # It joins in when it has caught up.
    subject = f"{recorded.prefix}k0"
    wait_until(
        lambda: answered_by(recorded.url, recorded.stream, subject) is None,
        "it answers",
        deadline=120,
    )
    config = api(recorded.url, f"STREAM.INFO.{recorded.stream}")["config"]
    api(recorded.url, f"STREAM.UPDATE.{recorded.stream}", {**config, "allow_direct": False})
    last = f"{recorded.prefix}{JUNK}"
    assert {answered_by(recorded.url, recorded.stream, last) for _ in range(10)} == {part["name"]}


def asked_a_mirror(proxy: Proxy) -> bool:
    """Whether Direct Gets requested ranks, each with a response of a mirror or a 404."""
    asked = len(proxy.asked("$JS.API.DIRECT.GET."))
    answers = [frame for frame in proxy.seen if b"-part\r\n" in frame or b"NATS/1.0 404" in frame]
    return 0 < asked <= len(answers)


def check_balance(splits: Sequence[tuple[int, int]], rows: Sequence[Row]) -> None:
    """Four splits are balanced within a factor of 2."""
    sizes = [sum(start < row.seq <= end for row in rows) for start, end in splits]
    assert len(sizes) == 4
    assert sum(sizes) == len(rows)
    assert max(sizes) <= 2 * min(sizes), sizes


# -- queries ---------------------------------------------------------------------------------------


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
    domains.mirror(recorded.stream, recorded.history)
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


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("what", BATCHES)
def test_partial_mirror_serves_direct_get_of_batch(
    shared_server: NatsServer, what: str, part: str
) -> None:
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
            tasks = [one.splits[0] for one in tasks_of(batch_reader(proxy.url, **options))]
            if what in ("all", "stream"):
                assert asked_a_mirror(proxy)
            rows = read_sorted(proxy.url, options)
            assert what in ("all", "stream") or not proxy.asked("$JS.API.DIRECT.GET.")
        recorded.check(rows, lost=[junk] if narrow else [])
        assert len(rows) == ENTRIES + (not narrow)
        if what in ("all", "stream"):
            check_balance([(task.range.start, task.range.end) for task in tasks], rows)


@pytest.mark.parametrize("what", BATCHES)
def test_lagging_mirror_serves_batch(domains: HubAndLeaf, what: str) -> None:
    """A batch reads all that the mirror has; a later batch reads the rest."""
    recorded = RecordedStream(recorded_kind(what), domains.hub.url).create()
    recorded.write(500)
    domains.mirror(recorded.stream, recorded.history)
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
