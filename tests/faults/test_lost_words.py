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
from buckets import api

from faults.harm import When
from faults.losses import expire, limit, purge
from faults.proxy import Proxy
from faults.reading import Reading
from faults.trial import Trial, keep_store, warnings
from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError

READ, GONE, LEFT = 200, 70, 30
ACCEPT = {"failOnDataLoss": "false"}
WORDS = {"kv": "revision", "stream": "sequence"}


@pytest.fixture(params=WORDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def trial(kind: str, shared_server: NatsServer) -> Trial:
    trial = Trial(kind, shared_server.url).create(duplicate_window=100_000_000)
    trial.write(READ)
    return trial


def offsets_of(trial: Trial) -> list[dict[str, Any]]:
    """A checkpoint after all that there is."""
    with trial.reading() as reading:
        reading.until(trial.last)
    trial.check(reading.rows)
    return reading.offsets


def refused_of(reading: Reading) -> str:
    """The error of the next micro-batch, planned or not."""
    with pytest.raises(DataLossError) as caught:
        reading.read() if reading.logged is not None else reading.plan()
    assert reading.rows == []
    return str(caught.value)


def check_words(refused: str, caplog: pytest.LogCaptureFixture, what: str, instead: str) -> None:
    """One sentence for both, which says what is gone, and what the option makes of it."""
    assert refused.startswith(what)
    assert f". Set the option failOnDataLoss=false to {instead};" in refused
    (told,) = [text for text in warnings(caplog) if "data loss" in text]
    assert told.startswith(f"data loss accepted: {what}")
    assert f"; failOnDataLoss=false: {instead}" in told


def purged(trial: Trial) -> None:
    trial.write(GONE + LEFT)
    purge(trial, keep=LEFT)


def limited(trial: Trial) -> None:
    trial.write(GONE + LEFT)
    limit(trial, keep=LEFT)


def expired(trial: Trial) -> None:
    trial.write(GONE)
    expire(trial)
    trial.write(LEFT)


@pytest.mark.parametrize("cause", [purged, limited, expired])
def test_while_the_query_is_stopped(
    trial: Trial, caplog: pytest.LogCaptureFixture, cause: Callable[[Trial], None]
) -> None:
    offsets = offsets_of(trial)
    cause(trial)
    with trial.reading(offsets=offsets) as reading:
        refused = refused_of(reading)
    caplog.clear()
    with trial.reading(offsets=offsets, **ACCEPT) as accepted:
        accepted.until(trial.last)
    check_aged_out(trial, refused, caplog, accepted)


@pytest.mark.parametrize("cause", [purge, limit])
def test_when_it_is_planned(
    trial: Trial, caplog: pytest.LogCaptureFixture, cause: Callable[[Trial, int], None]
) -> None:
    """The reader says the same, which has not asked for the numbers before."""
    offsets = offsets_of(trial)
    trial.write(GONE + LEFT)
    with (
        trial.reading(offsets=offsets) as reading,
        trial.reading(offsets=offsets, **ACCEPT) as accepted,
    ):
        assert reading.plan()
        assert accepted.plan()
        cause(trial, LEFT)
        refused = refused_of(reading)
        caplog.clear()
        accepted.read()
    check_aged_out(trial, refused, caplog, accepted)


def check_aged_out(
    trial: Trial, refused: str, caplog: pytest.LogCaptureFixture, accepted: Reading
) -> None:
    word, first = WORDS[trial.kind], READ + GONE + 1
    assert trial.state()["first_seq"] == first
    what = (
        f"stream {trial.stream} begins at {first} by now: {word}s {READ + 1} to {first - 1} went "
        f"away before they were read ("
    )
    check_words(refused, caplog, what, f"go on with {word} {first}")
    trial.check(accepted.rows, after=first - 1)
    assert len(accepted.rows) == LEFT


@contextlib.contextmanager
def overtaken_at_a_hole(trial: Trial, server: NatsServer) -> Iterator[str]:
    """Of 1,000 messages 250 is missing, and when 300 is read, all up to 450 go; the URL for it."""
    trial.write(1000, size=1000)
    api(trial.url, f"STREAM.PURGE.{trial.stream}", {"filter": f"{trial.prefix}k249"})
    harm = When(300, lambda: purge(trial, keep=1000 - 450))
    with Proxy(server.port, harm) as proxy:
        yield proxy.url
    assert harm.consumer
    assert trial.state()["first_seq"] == 451


def test_what_had_a_hole_is_counted(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Where it is not all of a range that did not come, it says how many of it.

    What was a hole before may have been lost like the others: nobody can tell any more.
    """
    first, second = (Trial(kind, shared_server.url).create() for _ in range(2))
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
    what = (
        f"stream {second.stream} begins at 451 by now: 152 of {word}s 250 to 450 went away before "
        f"they were read ("
    )
    refused = refused.replace(f"stream {first.stream} ", f"stream {second.stream} ")
    check_words(refused, caplog, what, f"go on with {word} 451")
    gone = [250, *range(300, 451)]
    second.check(accepted.rows, lost=gone)
    assert len(accepted.rows) == 1000 - len(gone)


def test_deleted_and_made_again(trial: Trial, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    offsets = offsets_of(trial)
    trial.write(GONE)
    before = offsets[-1]["created"]
    api(trial.url, f"STREAM.DELETE.{trial.stream}")
    trial.acknowledged.clear()
    trial.create()
    trial.write(LEFT)
    created = api(trial.url, f"STREAM.INFO.{trial.stream}")["created"]
    assert created != before
    with trial.reading(offsets=offsets) as reading:
        refused = refused_of(reading)
    caplog.clear()
    with trial.reading(offsets=offsets, **ACCEPT) as accepted:
        accepted.drain()
    what = (
        f"stream {trial.stream} was deleted and made again (created {created}, the checkpoint has "
        f"{before}): what came after {WORDS[kind]} {READ} and was not read is gone"
    )
    check_words(refused, caplog, what, "read the new stream from its beginning")
    trial.check(accepted.rows)
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
    trial = Trial(kind, nats_server.url).create()
    trial.write(READ)
    restore = keep_store(nats_server, tmp_path)
    trial.write(GONE)
    offsets = offsets_of(trial)
    restore()
    trial.forget(READ)
    trial.write(more)
    with trial.reading(offsets=offsets) as reading:
        refused = refused_of(reading)
    caplog.clear()
    with trial.reading(offsets=offsets, **ACCEPT) as accepted:
        accepted.drain()
    what = (
        f"stream {trial.stream} was set back: it now ends at {READ + more}, or has another message "
        f"at {READ + GONE}, which the query had read"
    )
    check_words(refused, caplog, what, f"go on after {WORDS[kind]} {READ}")
    trial.check(accepted.rows, after=READ)
    assert len(accepted.rows) == more
