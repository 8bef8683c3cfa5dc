"""Batch reads in trouble: the same oracle, for each kind of batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from batch_reads import batch_reader

from faults.harm import Harm, Last, Nth, Sequences, Silence, When
from faults.proxy import CutAt, Proxy
from faults.trial import Row, Trial, rows_of
from nats_stream_source.embedded import NatsServer
from nats_stream_source.source.runtime import drop_kept_runners

COUNT = 1500


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


def options_of(trial: Trial, what: str) -> dict[str, str]:
    if what == "stream":
        return {"stream": trial.name, "minPartitions": "3"}
    more = {"as of": {"asOfSequence": str(COUNT)}, "all": {"includeHistory": "true"}}
    return {"bucket": trial.name, **more.get(what, {})}


def read(url: str, options: dict[str, str]) -> list[Row]:
    reader = batch_reader(url, **options)
    rows: list[Row] = []
    try:
        for split in reader.partitions():
            for batch in reader.read(split):
                rows += rows_of(batch)
    finally:
        drop_kept_runners()
    return rows


HARMS: dict[str, Callable[[NatsServer], Harm]] = {
    "messages lost": lambda server: Sequences([1, 700, 701, COUNT]),
    "last lost": lambda server: Last(),
    "cut": lambda server: Nth([500], CutAt(30)),
    "silence": lambda server: Silence(700),
    "restart": lambda server: When(700, server.restart),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(
    "what",
    [
        "now",
        pytest.param("as of", marks=pytest.mark.faults),
        pytest.param("all", marks=pytest.mark.faults),
        "stream",
    ],
)
def test_a_batch_in_trouble(server: NatsServer, what: str, harm: str) -> None:
    trial = Trial("stream" if what == "stream" else "kv", server.url).create()
    trial.write(COUNT, size=1000)
    if what == "as of":
        trial.write(100)
    done = HARMS[harm](server)
    with Proxy(server.port, done) as proxy:
        rows = read(proxy.url, options_of(trial, what))
    assert done.done
    trial.check(sorted(rows, key=lambda row: row.seq), through=COUNT)
    assert len(rows) == COUNT
    assert trial.consumers() == []
