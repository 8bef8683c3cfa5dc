"""What a data loss is called: the error, and the warning where it is accepted, have its numbers.

Each loss is found by a query that was stopped meanwhile, and by one that had planned a micro-batch
already. ``failOnDataLoss`` is named each time; where it is false, the rows are what is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from tests.support.nats.buckets import api
from tests.support.nats.retention import expire, limit, purge
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import When
from tests.support.query_driver.micro_batch import MicroBatchQuery
from tests.support.workload import Workload, keep_store, warnings

READ, GONE, LEFT = 200, 70, 30
ACCEPT = {"failOnDataLoss": "false"}
WORDS = {"kv": "revision", "stream": "sequence"}

pytestmark = pytest.mark.workload(kinds=WORDS, count=READ, duplicate_window=100_000_000)


@pytest.fixture(params=WORDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def offsets_of(workload: Workload) -> list[dict[str, Any]]:
    """A checkpoint after all that there is."""
    with workload.reading() as reading:
        reading.until(workload.last)
    workload.check(reading.rows)
    return reading.offsets


def refused_of(reading: MicroBatchQuery) -> str:
    """The error of the next micro-batch, planned or not."""
    with pytest.raises(DataLossError) as caught:
        reading.read() if reading.logged is not None else reading.plan()
    assert reading.rows == []
    return str(caught.value)


def check_words(
    refused: str, caplog: pytest.LogCaptureFixture, stream: str, what: str, instead: str
) -> None:
    """One sentence for both: what was lost, and what the option does instead."""
    assert refused.startswith(f"data loss in stream {stream}: {what}")
    assert f"; set failOnDataLoss=false to {instead}, or start " in refused
    (told,) = [text for text in warnings(caplog) if "data loss" in text]
    assert told.startswith(f"data loss accepted: stream {stream}: {what}")
    assert f"; failOnDataLoss=false: {instead}" in told


def purged(workload: Workload) -> None:
    workload.write(GONE + LEFT)
    purge(workload, keep=LEFT)


def limited(workload: Workload) -> None:
    workload.write(GONE + LEFT)
    limit(workload, keep=LEFT)


def expired(workload: Workload) -> None:
    workload.write(GONE)
    expire(workload)
    workload.write(LEFT)


@pytest.mark.parametrize("cause", [purged, limited, expired])
def test_while_the_query_is_stopped(
    workload: Workload, caplog: pytest.LogCaptureFixture, cause: Callable[[Workload], None]
) -> None:
    offsets = offsets_of(workload)
    cause(workload)
    with workload.reading(offsets=offsets) as reading:
        refused = refused_of(reading)
    caplog.clear()
    with workload.reading(offsets=offsets, **ACCEPT) as accepted:
        accepted.until(workload.last)
    check_aged_out(workload, refused, caplog, accepted)


@pytest.mark.parametrize("cause", [purge, limit])
def test_when_it_is_planned(
    workload: Workload, caplog: pytest.LogCaptureFixture, cause: Callable[[Workload, int], None]
) -> None:
    """The reader says the same, which has not asked for the numbers before."""
    offsets = offsets_of(workload)
    workload.write(GONE + LEFT)
    with (
        workload.reading(offsets=offsets) as reading,
        workload.reading(offsets=offsets, **ACCEPT) as accepted,
    ):
        assert reading.plan()
        assert accepted.plan()
        cause(workload, LEFT)
        refused = refused_of(reading)
        caplog.clear()
        accepted.read()
    check_aged_out(workload, refused, caplog, accepted)


def check_aged_out(
    workload: Workload, refused: str, caplog: pytest.LogCaptureFixture, accepted: MicroBatchQuery
) -> None:
    word, first = WORDS[workload.kind], READ + GONE + 1
    assert workload.state()["first_seq"] == first
    what = (
        f"first {word} is {first}, expected {READ + 1} or lower "
        f"({word}s {READ + 1} to {first - 1} aged out; "
    )
    check_words(refused, caplog, workload.stream, what, f"continue at {first}")
    workload.check(accepted.rows, after=first - 1)
    assert len(accepted.rows) == LEFT


@contextlib.contextmanager
def overtaken_at_a_hole(workload: Workload, server: NatsServer) -> Iterator[str]:
    """Of 1,000 messages 250 is missing, and when 300 is read, all up to 450 go; the URL for it."""
    workload.write(1000, size=1000)
    api(workload.url, f"STREAM.PURGE.{workload.stream}", {"filter": f"{workload.prefix}k249"})
    harm = When(300, lambda: purge(workload, keep=1000 - 450))
    with Proxy(server.port, harm) as proxy:
        yield proxy.url
    assert harm.consumer
    assert workload.state()["first_seq"] == 451


def test_what_had_a_hole_is_counted(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Where it is not all of a range that did not come, it says how many of it.

    What was a hole before may have been lost like the others: nobody can tell any more.
    """
    first, second = (Workload(kind, shared_server.url).create() for _ in range(2))
    with overtaken_at_a_hole(first, shared_server) as url, first.reading(url) as reading:
        assert reading.plan()
        refused = refused_of(reading)
    caplog.clear()
    with (
        overtaken_at_a_hole(second, shared_server) as url,
        second.reading(url, **ACCEPT) as accepted,
    ):
        assert accepted.plan()
        accepted.read()
    word = WORDS[kind]
    what = f"first {word} is 451, expected 250 or lower (152 of {word}s 250 to 450 aged out; "
    refused = refused.replace(f"stream {first.stream}:", f"stream {second.stream}:")
    check_words(refused, caplog, second.stream, what, "continue at 451")
    gone = [250, *range(300, 451)]
    second.check(accepted.rows, lost=gone)
    assert len(accepted.rows) == 1000 - len(gone)


def test_deleted_and_made_again(workload: Workload, caplog: pytest.LogCaptureFixture) -> None:
    offsets = offsets_of(workload)
    workload.write(GONE)
    before = offsets[-1]["created"]
    api(workload.url, f"STREAM.DELETE.{workload.stream}")
    workload.acknowledged.clear()
    workload.create()
    workload.write(LEFT)
    created = api(workload.url, f"STREAM.INFO.{workload.stream}")["created"]
    assert created != before
    with workload.reading(offsets=offsets) as reading:
        refused = refused_of(reading)
    caplog.clear()
    with workload.reading(offsets=offsets, **ACCEPT) as accepted:
        accepted.drain()
    what = (
        f"stream was deleted and re-created: it was created at {created}, expected {before} "
        f"(messages after {WORDS[workload.kind]} {READ} were not read)"
    )
    check_words(refused, caplog, workload.stream, what, "read the re-created stream from its start")
    workload.check(accepted.rows)
    assert len(accepted.rows) == LEFT


@pytest.mark.parametrize("more", [LEFT, 2 * GONE], ids=["behind", "grown past it"])
def test_set_back(
    nats_server: NatsServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    more: int,
) -> None:
    """Where it stands now, where it was read up to, and after what it goes on."""
    workload = Workload(kind, nats_server.url).create()
    workload.write(READ)
    restore = keep_store(nats_server, tmp_path)
    workload.write(GONE)
    offsets = offsets_of(workload)
    restore()
    workload.forget(READ)
    workload.write(more)
    with workload.reading(offsets=offsets) as reading:
        refused = refused_of(reading)
    caplog.clear()
    with workload.reading(offsets=offsets, **ACCEPT) as accepted:
        accepted.drain()
    word = WORDS[kind]
    observed = (
        f"last {word} is {READ + more}, expected {READ + GONE} or higher"
        if more < GONE
        else f"{word} {READ + GONE} has another message, expected the one that the query had read"
    )
    what = f"stream was rolled back: {observed}"
    check_words(refused, caplog, workload.stream, what, f"continue after {word} {READ}")
    workload.check(accepted.rows, after=READ)
    assert len(accepted.rows) == more
