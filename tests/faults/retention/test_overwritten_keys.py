"""Few keys, written over and over: before they are read, in the middle of it, and afterwards.

A list of last values has holes everywhere, so that one that went on by sequence after a fault would
have rows that no list has. What comes after it is a row each, unless it was superseded before its
micro-batch was read. See ``row_check.check_batches``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.conftest import NewRecordedStream
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import ConsumerDeletedEarly, FrameFault, Last, Nth, When
from tests.support.recorded_stream import RecordedStream

KEYS, COUNT = 300, 1500

HOT = {
    "list": ("kv current", 64),
    "kept once": ("kv current", 1),  # a range with holes, not a list
    "history": ("kv", 64),
}


@pytest.fixture(params=HOT)
def repeated_keys(
    request: pytest.FixtureRequest, new_recorded: NewRecordedStream
) -> RecordedStream:
    """A recorded stream that overwrites few keys, read as a list of last values or as a range."""
    kind, history = HOT[request.param]
    return new_recorded(kind, COUNT, 1000, hot=KEYS, history=history)


@pytest.fixture
def last_values_stream(new_recorded: NewRecordedStream) -> RecordedStream:
    """A recorded stream whose initial values are read as a list of last values."""
    return new_recorded("kv current", COUNT, 1000, hot=KEYS)


LOST: dict[str, Callable[[], FrameFault]] = {
    "first": lambda: Nth([1]),
    "one": lambda: Nth([120]),
    "many": lambda: Nth([20, 180, 420, 700, 1000]),
    "only the last": Last,
    "the last hundred": lambda: Nth(range(170, 270)),
}


@pytest.mark.parametrize("which", LOST)
def test_messages_are_lost(
    repeated_keys: RecordedStream, shared_server: NatsServer, which: str
) -> None:
    """Of the initial values, and of the changes that follow."""
    with Proxy(shared_server.port) as proxy, repeated_keys.query(proxy.url) as query:
        for _ in range(2):
            before = len(proxy.created)
            proxy.verdict = fault = LOST[which]()
            assert query.plan()
            query.read()
            assert query.seq == repeated_keys.last
            assert fault.done > 0
            assert len(proxy.created) - before > 1
            repeated_keys.write(COUNT, size=1000)
        proxy.verdict = lambda frame: True
        query.until(repeated_keys.last)
        assert set(proxy.created) == set(proxy.deleted)
    repeated_keys.check_queries(query)
    assert [batch.listed for batch in query.done] == [
        repeated_keys.kind == "kv current" and repeated_keys.history > 1,
        *(False for _ in query.done[1:]),
    ]
    assert repeated_keys.consumers() == []


def overwritten(recorded: RecordedStream) -> Callable[[], None]:
    return lambda: recorded.write(COUNT, size=1000)


def overwritten_and_deleted(recorded: RecordedStream) -> Callable[[], None]:
    def act() -> None:
        recorded.write(COUNT, size=1000)
        assert recorded.delete_consumers()

    return act


@pytest.mark.parametrize("lose", [False, True], ids=["", "the rest is lost"])
@pytest.mark.parametrize("act", [overwritten, overwritten_and_deleted])
def test_initial_values_overwritten_while_read(
    last_values_stream: RecordedStream,
    shared_server: NatsServer,
    act: Callable[[RecordedStream], Callable[[], None]],
    lose: bool,
) -> None:
    """Keys that were not delivered are read at their new positions; no row is repeated."""
    last = last_values_stream.last_values()
    fault = When(last[len(last) // 2], act(last_values_stream), lose=lose)
    with Proxy(shared_server.port, fault) as proxy, last_values_stream.query(proxy.url) as query:
        assert query.plan()
        rows = query.read().rows
        assert fault.consumer
        assert {row.seq for row in rows} <= set(last)
        if lose:
            assert len(proxy.created) > 1
            assert len(rows) < len(last)
        query.until(last_values_stream.last)
    last_values_stream.check_queries(query)
    assert last_values_stream.consumers() == []


def test_initial_values_consumer_deleted_before_first_message(
    last_values_stream: RecordedStream, shared_server: NatsServer
) -> None:
    """All keys are overwritten then: there are fewer initial values, and the changes follow."""

    def delete() -> list[str]:
        last_values_stream.write(COUNT, size=1000)
        return last_values_stream.delete_consumers()

    last = last_values_stream.last_values()
    fault = ConsumerDeletedEarly(delete)
    with Proxy(shared_server.port, fault) as proxy, last_values_stream.query(proxy.url) as query:
        assert query.plan()
        rows = query.read().rows
        assert fault.gone == proxy.created[:1]
        assert len(proxy.created) > 1
        assert len(rows) < len(last)
        query.until(last_values_stream.last)
    last_values_stream.check_queries(query)


def test_restart_within_changes(repeated_keys: RecordedStream) -> None:
    """The second query resumes the first one's offsets, and does not repeat the initial values."""
    with repeated_keys.query() as first:
        first.until(repeated_keys.last)
        repeated_keys.write(COUNT)
    with repeated_keys.query(offsets=first.offsets) as second:
        assert second.plan()
        repeated_keys.write(COUNT)
        second.read()
        second.until(repeated_keys.last)
    repeated_keys.check_queries(first, second)
    assert len(first.rows) < COUNT
