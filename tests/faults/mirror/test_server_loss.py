"""Relays that end while they are read from: a mirror's server, a leaf node, the hub behind it.

- *mirror*: the reader is at a leaf node, and reads a mirror that lies there of a stream at the hub.
- *leaf*: the reader is at the leaf node and reads the hub's stream across the line between the two.

Each is killed, stopped for a while or restarted in the middle of a split, seen by a proxy before
the leaf node. The reader's connection ends with the leaf node, and lasts where the hub ends. The
rows are all that was acknowledged, from micro-batches as from a batch. A relay that is unavailable
longer than ``connectTimeout`` ends in a ConnectError, which no test here covers.

At the end a stream of another account, imported as in ADR-19, under the faults of one account. With
ADR-19's own configuration, responses to flow control do not cross the import, and of several
responses to a request only the first one does. The reader uses other ways from the start
(docs/internals/measurements.md, Servers 15).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.nats.topology import (
    ADR19_API_PREFIX,
    ADR19_INBOX_PREFIX,
    Adr19Server,
    HubAndLeaf,
    adr19_server,
    hub_and_leaf,
    wait_for_seq,
)
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import FrameFault, Last, Sequences, When
from tests.support.query_driver.batch import BATCHES, batch_options, read_sorted, recorded_kind
from tests.support.recorded_stream import (
    AGAIN,
    DEADLINE,
    KINDS,
    KINDS_IN_TURN,
    RecordedStream,
    crash,
)
from tests.support.wait import wait_until

COUNT = 1500
PATIENCE = {"requestTimeout": "2", "connectTimeout": "60"}
_AWAY = 4.0  # seconds: more than three heartbeats and than a PONG is waited for


@pytest.fixture(scope="module")
def both() -> Iterator[HubAndLeaf]:
    with hub_and_leaf() as both:
        yield both


def stop(server: NatsServer) -> None:
    server.pause()
    threading.Timer(_AWAY, server.resume).start()


HOW: dict[str, Callable[[NatsServer], None]] = {**AGAIN, "stopped": stop}


@dataclass(frozen=True)
class Relayed:
    """What is read at the leaf node: a mirror there, or the hub's stream through it."""

    both: HubAndLeaf
    what: str

    @property
    def options(self) -> dict[str, str]:
        return PATIENCE | ({"domain": "hub"} if self.what == "leaf" else {})

    def create(self, kind: str) -> RecordedStream:
        """The recorded stream at the hub with all its values, and what relays it."""
        self.both.wait_joined()
        recorded = RecordedStream(kind, self.both.hub.url).create()
        recorded.write(COUNT, size=1000)
        if self.what == "mirror":
            self.both.mirror(recorded.stream, recorded.history)
        return recorded

    def wait_for(self, recorded: RecordedStream) -> None:
        """Until all that was written can be read at the leaf node."""
        if self.what == "mirror":
            wait_for_seq(self.both.leaf.url, recorded.stream, recorded.last)


CASES = [
    *(("mirror", "leaf", how) for how in HOW),
    *(("mirror", "hub", how) for how in ("killed", "stopped")),
    *(("leaf", "leaf", how) for how in ("killed", "stopped")),
    *(("leaf", "hub", how) for how in ("stopped", "restarted")),
]
"""What is read, whose server goes away, and how; the other two have a test of their own."""

BATCH_CASES = [
    (what, whose, how)
    for what, whose in (("mirror", "leaf"), ("leaf", "leaf"), ("leaf", "hub"))
    for how in ("killed", "stopped")
]
"""A batch of a mirror that has all asks nothing of the hub."""


class Away:
    """Injects its fault into a server once, when it is called.

    Attributes:
        before: the process that it was done to.
        stopped: what is there to see of a server that was stopped.
    """

    def __init__(self, server: NatsServer, how: str) -> None:
        self._server = server
        self._how = how
        self.before = server.pid
        self.stopped = False

    def __call__(self) -> None:
        HOW[self._how](self._server)
        self.stopped = self._server.paused

    def check(self) -> None:
        wait_until(lambda: not self._server.paused, "it goes on", deadline=DEADLINE)
        if self._how == "stopped":
            assert self.stopped
        else:
            assert self._server.pid != self.before


def read_a_split(relayed: Relayed, kind: str, away: Callable[[], None]) -> None:
    """Read the stream; call ``away`` in the middle of a split."""
    both, recorded = relayed.both, relayed.create(kind)
    when = When(COUNT // 2, away)
    with (
        Proxy(both.leaf.port, when, keep=0) as proxy,
        recorded.query(proxy.url, **relayed.options) as query,
    ):
        query.until(COUNT)
        assert when.consumer
        recorded.write(100)
        relayed.wait_for(recorded)
        query.until(recorded.last)
    recorded.check(query.rows)


@pytest.mark.faults
@pytest.mark.parametrize(("read_from", "whose", "how"), CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_mirror_server_lost_while_split_is_read(
    both: HubAndLeaf, kind: str, read_from: str, whose: str, how: str
) -> None:
    away = Away(getattr(both, whose), how)
    read_a_split(Relayed(both, read_from), kind, away)
    away.check()


def hold(both: HubAndLeaf) -> None:
    """For longer than three heartbeats are waited for."""
    both.line.hold()
    threading.Timer(2.5, both.line.release).start()


LEAF_FAULTS: dict[str, Callable[[HubAndLeaf], None]] = {
    "line held": hold,
    "hub killed": lambda both: AGAIN["killed"](both.hub),
    "leaf restarted": lambda both: AGAIN["restarted"](both.leaf),
}


@pytest.mark.parametrize("fault", LEAF_FAULTS)
@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_leaf_node_lost_while_split_is_read(both: HubAndLeaf, kind: str, fault: str) -> None:
    read_a_split(Relayed(both, "leaf"), kind, lambda: LEAF_FAULTS[fault](both))


@pytest.mark.faults
@pytest.mark.parametrize(("read_from", "whose", "how"), BATCH_CASES)
@pytest.mark.parametrize("what", BATCHES)
def test_mirror_server_lost_while_batch_is_read(
    both: HubAndLeaf, what: str, read_from: str, whose: str, how: str
) -> None:
    relayed = Relayed(both, read_from)
    recorded = relayed.create(recorded_kind(what))
    away = Away(getattr(both, whose), how)
    # The first of four tasks has a fourth of the rows.
    when = When(COUNT // 8, away)
    with Proxy(both.leaf.port, when, keep=0) as proxy:
        rows = read_sorted(proxy.url, {**batch_options(recorded, what), **relayed.options})
    assert when.consumer
    away.check()
    recorded.check(rows)
    assert len(rows) == COUNT


@pytest.fixture(scope="module")
def accounts() -> Iterator[Adr19Server]:
    with adr19_server() as accounts:
        yield accounts


FAULTS: dict[str, Callable[[Adr19Server], FrameFault]] = {
    "messages lost": lambda accounts: Sequences([1, 700, 701]),
    "last lost": lambda accounts: Last(),
    "server killed": lambda accounts: When(700, lambda: crash(accounts.server)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_import_interrupted_while_split_is_read(
    accounts: Adr19Server, kind: str, fault: str
) -> None:
    recorded = RecordedStream(kind, accounts.exporter).create()
    recorded.write(COUNT, size=1000)
    done = FAULTS[fault](accounts)
    importer = {"user": "i", "password": "i"}
    prefixes = {"apiPrefix": ADR19_API_PREFIX, "inboxPrefix": ADR19_INBOX_PREFIX}
    proxied = Proxy(accounts.server.port, done, keep=0)
    with proxied as proxy, recorded.query(proxy.url, **importer, **prefixes) as query:
        query.until(COUNT)
    assert done.done
    recorded.check(query.rows)
    assert recorded.consumers() == []
