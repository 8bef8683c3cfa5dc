"""Frames that are lost, late, doubled, in disorder or cut: every write is read once, in order.

Each fault is done by the proxy and counted; the consumers that the reader made and deleted are on
the proxy's record.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nats_stream_source.embedded import NatsServer
from tests.support.proxy.fault_proxy import (
    After,
    CutAt,
    Delay,
    Proxy,
    Twice,
    is_delivery,
    is_status,
    stream_seq,
)
from tests.support.proxy.verdicts import (
    ConsumerDeletedAt,
    ConsumerDeletedEarly,
    FrameFault,
    Last,
    Nth,
    Published,
    Sequences,
    Share,
    Silence,
    Status,
)
from tests.support.recorded_stream import KINDS, KINDS_IN_TURN, RecordedStream, use_long_deadlines

COUNT = 1500
"""Messages of 1 KB: more than the server sends before it requests flow control."""

pytestmark = pytest.mark.recorded(kinds=KINDS, count=COUNT, size=1000)


def read_through(
    recorded: RecordedStream,
    server: NatsServer,
    down: FrameFault | None = None,
    up: FrameFault | None = None,
    rate: float | None = None,
) -> Proxy:
    """Read all of it through the proxy, compare, and look for what was left behind."""
    with Proxy(server.port, down, up, rate=rate) as proxy:
        with recorded.query(proxy.url) as query:
            query.until(recorded.last)
        recorded.check(query.rows)
    assert recorded.consumers() == []
    return proxy


LOST: dict[str, Callable[[], FrameFault]] = {
    "first": lambda: Nth([1]),
    "one": lambda: Sequences([700]),
    "many": lambda: Sequences(range(100, COUNT, 97)),
    "only the last": lambda: Last(),
    "the last hundred": lambda: Sequences(range(COUNT - 99, COUNT + 1)),
}


@pytest.mark.parametrize("which", LOST)
def test_messages_are_lost(recorded: RecordedStream, shared_server: NatsServer, which: str) -> None:
    fault = LOST[which]()
    proxy = read_through(recorded, shared_server, fault)
    assert fault.done == len(proxy.dropped) > 0
    assert len(proxy.created) > 1
    assert set(proxy.created) == set(proxy.deleted)


def test_tenth_of_messages_dropped(shared_server: NatsServer) -> None:
    """A rebuild every ten messages: each makes progress, so none is one too many."""
    recorded = RecordedStream("stream", shared_server.url).create()
    recorded.write(400)
    fault = Share(0.1, seed=7)
    proxy = read_through(recorded, shared_server, fault)
    assert fault.done > 20
    assert set(proxy.created) == set(proxy.deleted)


DISORDER = {
    "doubled": Twice(),
    "late by one": After(1),
    "late by fifty": After(50),
    "slow": Delay(0.2),
}


@pytest.mark.parametrize("how", DISORDER)
def test_message_altered(
    recorded: RecordedStream, shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "slow":
        use_long_deadlines(monkeypatch)
    fault = Sequences([1, 500, 1000, COUNT], DISORDER[how])
    proxy = read_through(recorded, shared_server, fault)
    assert fault.done == 4
    # A list of last messages drops a copy where it detects it; other reads start again.
    tolerated = how == "slow" or (how == "doubled" and "current" in recorded.kind)
    assert (len(proxy.created) > 1) is not tolerated


@pytest.mark.parametrize("size", [10, 60, 600], ids=["subject", "reply", "payload"])
def test_cut_within_frame(
    recorded_messages: RecordedStream, shared_server: NatsServer, size: int
) -> None:
    fault = Sequences([800], CutAt(size))
    proxy = read_through(recorded_messages, shared_server, fault)
    assert fault.done == 1
    assert proxy.connections > 2  # the planner's, the reader's, and the reader's next


def test_connection_reset_repeatedly(
    recorded_messages: RecordedStream, shared_server: NatsServer
) -> None:
    fault = Sequences([400, 800], CutAt(0))
    proxy = read_through(recorded_messages, shared_server, fault)
    assert fault.done == 2
    assert proxy.connections > 3


def test_line_slow(
    recorded_messages: RecordedStream, shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower than flow control expects it: nothing is given up."""
    use_long_deadlines(monkeypatch)
    proxy = read_through(recorded_messages, shared_server, rate=2_000_000)
    assert len(proxy.created) == 1


@pytest.mark.faults
def test_line_at_modem_rate(recorded_messages: RecordedStream, shared_server: NatsServer) -> None:
    proxy = read_through(recorded_messages, shared_server, rate=100_000)
    assert proxy.asked("$JS.FC.")


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_line_slow_and_full(shared_server: NatsServer, kind: str) -> None:
    """Seconds of messages stand before each PONG; a list would start over after each reconnect."""
    recorded = RecordedStream(kind, shared_server.url).create()
    recorded.write(20_000, size=4000)
    proxy = read_through(recorded, shared_server, rate=8_000_000)
    assert len(proxy.created) == 1


# -- flow control and heartbeats ------------------------------------------------------------------


@pytest.fixture(params=KINDS_IN_TURN)
def large(request: pytest.FixtureRequest, shared_server: NatsServer) -> RecordedStream:
    """Several windows of flow control."""
    recorded = RecordedStream(request.param, shared_server.url).create()
    recorded.write(COUNT, size=20_000)
    return recorded


def test_flow_control_is_answered_each_time(
    large: RecordedStream, shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_long_deadlines(monkeypatch)
    proxy = read_through(large, shared_server)
    asked = sum(b" 100 FlowControl" in frame for frame in proxy.seen)
    assert 1 <= len(proxy.asked("$JS.FC.")) <= asked
    assert len(proxy.created) == 1


def test_flow_control_is_swallowed(
    large: RecordedStream, shared_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats report the stalled flow control, and the reader responds to it."""
    use_long_deadlines(monkeypatch, heartbeat=1.5)
    fault = Status("FlowControl", most=2)
    proxy = read_through(large, shared_server, fault)
    assert fault.done == 2
    assert len(proxy.created) == 1


def test_flow_control_response_dropped_once(
    large: RecordedStream, shared_server: NatsServer
) -> None:
    fault = Published("$JS.FC.", most=1)
    read_through(large, shared_server, up=fault)
    assert fault.done == 1


def test_flow_control_responses_all_dropped(
    large: RecordedStream, shared_server: NatsServer
) -> None:
    """The server stalls: the reader continues without flow control."""
    fault = Published("$JS.FC.")
    proxy = read_through(large, shared_server, up=fault)
    assert fault.done >= 1
    asked = proxy.flow_controlled
    assert asked[0]
    assert not asked[-1]


@pytest.mark.recorded(kinds=KINDS_IN_TURN)
def test_heartbeats_are_missed(recorded: RecordedStream, shared_server: NatsServer) -> None:
    fault = Silence(700)
    proxy = read_through(recorded, shared_server, fault)
    assert any(b"Idle Heartbeat" in frame for frame in proxy.dropped)
    assert len(proxy.created) > 1


def test_heartbeats_all_dropped(
    recorded_messages: RecordedStream, shared_server: NatsServer
) -> None:
    """Messages are a sign of life, too: they come for longer than heartbeats are waited for."""
    fault = Status("Idle Heartbeat")
    proxy = read_through(recorded_messages, shared_server, fault, rate=500_000)
    assert fault.done
    assert len(proxy.created) == 1


# -- the consumer is deleted ----------------------------------------------------------------------


@pytest.mark.recorded(kinds=KINDS_IN_TURN)
def test_consumer_deleted_while_read(recorded: RecordedStream, shared_server: NatsServer) -> None:
    fault = ConsumerDeletedAt(recorded.delete_consumers, 800)
    proxy = read_through(recorded, shared_server, fault)
    assert fault.gone == [fault.consumer] == proxy.created[:1]
    assert len(proxy.created) > 1


@pytest.mark.recorded(kinds=KINDS_IN_TURN)
def test_consumer_deleted_before_first_message(
    recorded: RecordedStream, shared_server: NatsServer
) -> None:
    fault = ConsumerDeletedEarly(recorded.delete_consumers)
    proxy = read_through(recorded, shared_server, fault)
    assert fault.gone == proxy.created[:1]
    assert len(proxy.created) > 1


@pytest.mark.parametrize("kind", KINDS_IN_TURN)
def test_consumer_deleted_while_idle(shared_server: NatsServer, kind: str) -> None:
    """The consumer has delivered all; the last message was lost, and its heartbeat reports that."""
    recorded = RecordedStream(kind, shared_server.url).create()
    recorded.write(COUNT)
    gone: list[str] = []

    class IdleConsumer(FrameFault):
        def hits(self, frame: bytes) -> bool:
            if is_delivery(frame):
                return not gone and stream_seq(frame) == COUNT
            if not gone and is_status(frame, b"Idle Heartbeat"):
                gone.extend(recorded.delete_consumers())
                return True
            return False

    fault = IdleConsumer()
    proxy = read_through(recorded, shared_server, fault)
    assert fault.done == 2
    assert gone == proxy.created[:1]
    assert len(proxy.created) > 1
