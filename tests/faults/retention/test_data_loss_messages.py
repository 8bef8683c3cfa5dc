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
from tests.support.nats.store_files import keep_store
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import When
from tests.support.query_driver.driver import QueryDriver
from tests.support.recorded_stream import RecordedStream, expire, limit, purge, warnings

READ, GONE, LEFT = 200, 70, 30
ACCEPT = {"failOnDataLoss": "false"}
WORDS = {"kv": "revision", "stream": "sequence"}

pytestmark = pytest.mark.recorded(kinds=WORDS, count=READ, duplicate_window=100_000_000)


@pytest.fixture(params=WORDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def offsets_of(recorded: RecordedStream) -> list[dict[str, Any]]:
    with recorded.query() as query:
        query.until(recorded.last)
    recorded.check(query.rows)
    return query.offsets


def refused_of(query: QueryDriver) -> str:
    """The error of the next micro-batch, planned or not."""
    with pytest.raises(DataLossError) as caught:
        query.read() if query.logged is not None else query.plan()
    assert query.rows == []
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


def purged(recorded: RecordedStream) -> None:
    recorded.write(GONE + LEFT)
    purge(recorded, keep=LEFT)


def limited(recorded: RecordedStream) -> None:
    recorded.write(GONE + LEFT)
    limit(recorded, keep=LEFT)


def expired(recorded: RecordedStream) -> None:
    recorded.write(GONE)
    expire(recorded)
    recorded.write(LEFT)


@pytest.mark.parametrize("cause", [purged, limited, expired])
def test_messages_removed_while_query_is_stopped(
    recorded: RecordedStream,
    caplog: pytest.LogCaptureFixture,
    cause: Callable[[RecordedStream], None],
) -> None:
    offsets = offsets_of(recorded)
    cause(recorded)
    with recorded.query(offsets=offsets) as query:
        refused = refused_of(query)
    caplog.clear()
    with recorded.query(offsets=offsets, **ACCEPT) as accepted:
        accepted.until(recorded.last)
    check_aged_out(recorded, refused, caplog, accepted)


@pytest.mark.parametrize("cause", [purge, limit])
def test_data_loss_message_at_planning(
    recorded: RecordedStream,
    caplog: pytest.LogCaptureFixture,
    cause: Callable[[RecordedStream, int], None],
) -> None:
    """The reader, which has not requested the numbers before, reports the same."""
    offsets = offsets_of(recorded)
    recorded.write(GONE + LEFT)
    with (
        recorded.query(offsets=offsets) as query,
        recorded.query(offsets=offsets, **ACCEPT) as accepted,
    ):
        assert query.plan()
        assert accepted.plan()
        cause(recorded, LEFT)
        refused = refused_of(query)
        caplog.clear()
        accepted.read()
    check_aged_out(recorded, refused, caplog, accepted)


def check_aged_out(
    recorded: RecordedStream, refused: str, caplog: pytest.LogCaptureFixture, accepted: QueryDriver
) -> None:
    word, first = WORDS[recorded.kind], READ + GONE + 1
    assert recorded.state()["first_seq"] == first
    what = (
        f"first {word} is {first}, expected {READ + 1} or lower "
        f"({word}s {READ + 1} to {first - 1} aged out; "
    )
    check_words(refused, caplog, recorded.stream, what, f"continue at {first}")
    recorded.check(accepted.rows, after=first - 1)
    assert len(accepted.rows) == LEFT


@contextlib.contextmanager
def limit_passes_hole(recorded: RecordedStream, server: NatsServer) -> Iterator[str]:
    """Of 1,000 messages 250 is missing, and when 300 is read, all up to 450 go; the URL for it."""
    recorded.write(1000, size=1000)
    api(recorded.url, f"STREAM.PURGE.{recorded.stream}", {"filter": f"{recorded.prefix}k249"})
    fault = When(300, lambda: purge(recorded, keep=1000 - 450))
    with Proxy(server.port, fault) as proxy:
        yield proxy.url
    assert fault.consumer
    assert recorded.state()["first_seq"] == 451


def test_data_loss_message_counts_hole(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Where only a part of a range is lost, the message has the number of its messages.

    What was a hole before may have been lost like the others: the stream does not show it.
    """
    first, second = (RecordedStream(kind, shared_server.url).create() for _ in range(2))
    with limit_passes_hole(first, shared_server) as url, first.query(url) as query:
        assert query.plan()
        refused = refused_of(query)
    caplog.clear()
    with (
        limit_passes_hole(second, shared_server) as url,
        second.query(url, **ACCEPT) as accepted,
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


def test_data_loss_message_of_recreated_stream(
    recorded: RecordedStream, caplog: pytest.LogCaptureFixture
) -> None:
    offsets = offsets_of(recorded)
    recorded.write(GONE)
    before = offsets[-1]["created"]
    api(recorded.url, f"STREAM.DELETE.{recorded.stream}")
    recorded.acknowledged.clear()
    recorded.create()
    recorded.write(LEFT)
    created = api(recorded.url, f"STREAM.INFO.{recorded.stream}")["created"]
    assert created != before
    with recorded.query(offsets=offsets) as query:
        refused = refused_of(query)
    caplog.clear()
    with recorded.query(offsets=offsets, **ACCEPT) as accepted:
        accepted.drain()
    what = (
        f"stream was deleted and re-created: it was created at {created}, expected {before} "
        f"(messages after {WORDS[recorded.kind]} {READ} were not read)"
    )
    check_words(refused, caplog, recorded.stream, what, "read the re-created stream from its start")
    recorded.check(accepted.rows)
    assert len(accepted.rows) == LEFT


@pytest.mark.parametrize("more", [LEFT, 2 * GONE], ids=["behind", "grown past it"])
def test_data_loss_message_of_rolled_back_stream(
    nats_server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, more: int
) -> None:
    """The message names the first sequence, the last one read, and where reading resumes."""
    recorded = RecordedStream(kind, nats_server.url).create()
    recorded.write(READ)
    restore = keep_store(nats_server, tmp_path)
    recorded.write(GONE)
    offsets = offsets_of(recorded)
    restore()
    recorded.remove_after(READ)
    recorded.write(more)
    with recorded.query(offsets=offsets) as query:
        refused = refused_of(query)
    caplog.clear()
    with recorded.query(offsets=offsets, **ACCEPT) as accepted:
        accepted.drain()
    word = WORDS[kind]
    observed = (
        f"last {word} is {READ + more}, expected {READ + GONE} or higher"
        if more < GONE
        else f"{word} {READ + GONE} has another message, expected the one that the query had read"
    )
    what = f"stream was rolled back: {observed}"
    check_words(refused, caplog, recorded.stream, what, f"continue after {word} {READ}")
    recorded.check(accepted.rows, after=READ)
    assert len(accepted.rows) == more
