"""Few keys, written over and over: before they are read, in the middle of it, and afterwards.

A list of last values has holes everywhere, so that one that went on by sequence after a fault would
have rows that no list has. What comes after it is a row each, unless it was superseded before its
micro-batch was read. See ``row_check.check_batches``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.conftest import NewWorkload
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import DeletedEarly, Harm, Last, Nth, When
from tests.support.workload import Workload

KEYS, COUNT = 300, 1500

HOT = {
    "list": ("kv current", 64),
    "kept once": ("kv current", 1),  # a range with holes, not a list
    "history": ("kv", 64),
}


@pytest.fixture(params=HOT)
def hot_workload(request: pytest.FixtureRequest, new_workload: NewWorkload) -> Workload:
    """A workload that overwrites few keys, read as a list of last values or as a range."""
    kind, history = HOT[request.param]
    return new_workload(kind, COUNT, 1000, hot=KEYS, history=history)


@pytest.fixture
def listed_workload(new_workload: NewWorkload) -> Workload:
    """A workload whose initial values are read as a list of last values."""
    return new_workload("kv current", COUNT, 1000, hot=KEYS)


LOST: dict[str, Callable[[], Harm]] = {
    "first": lambda: Nth([1]),
    "one": lambda: Nth([120]),
    "many": lambda: Nth([20, 180, 420, 700, 1000]),
    "only the last": Last,
    "the last hundred": lambda: Nth(range(170, 270)),
}


@pytest.mark.parametrize("which", LOST)
def test_messages_are_lost(hot_workload: Workload, shared_server: NatsServer, which: str) -> None:
    """Of the initial values, and of the changes that follow."""
    with Proxy(shared_server.port) as proxy, hot_workload.reading(proxy.url) as reading:
        for _ in range(2):
            before = len(proxy.created)
            proxy.verdict = harm = LOST[which]()
            assert reading.plan()
            reading.read()
            assert reading.seq == hot_workload.last
            assert harm.done > 0
            assert len(proxy.created) - before > 1
            hot_workload.write(COUNT, size=1000)
        proxy.verdict = lambda frame: True
        reading.until(hot_workload.last)
        assert set(proxy.created) == set(proxy.deleted)
    hot_workload.check_readings(reading)
    assert [batch.listed for batch in reading.done] == [
        hot_workload.kind == "kv current" and hot_workload.history > 1,
        *(False for _ in reading.done[1:]),
    ]
    assert hot_workload.consumers() == []


def overwritten(workload: Workload) -> Callable[[], None]:
    return lambda: workload.write(COUNT, size=1000)


def overwritten_and_deleted(workload: Workload) -> Callable[[], None]:
    def act() -> None:
        workload.write(COUNT, size=1000)
        assert workload.delete_consumers()

    return act


@pytest.mark.parametrize("lose", [False, True], ids=["", "the rest is lost"])
@pytest.mark.parametrize("act", [overwritten, overwritten_and_deleted])
def test_a_list_is_overwritten_while_it_is_read(
    listed_workload: Workload,
    shared_server: NatsServer,
    act: Callable[[Workload], Callable[[], None]],
    lose: bool,
) -> None:
    """What had not come goes on where it stands now, after the list: nothing comes twice."""
    last = listed_workload.last_values()
    harm = When(last[len(last) // 2], act(listed_workload), lose=lose)
    with Proxy(shared_server.port, harm) as proxy, listed_workload.reading(proxy.url) as reading:
        assert reading.plan()
        rows = reading.read()
        assert harm.consumer
        assert {row.seq for row in rows} <= set(last)
        if lose:
            assert len(proxy.created) > 1
            assert len(rows) < len(last)
        reading.until(listed_workload.last)
    listed_workload.check_readings(reading)
    assert listed_workload.consumers() == []


def test_the_consumer_of_a_list_is_deleted_before_its_first_message(
    listed_workload: Workload, shared_server: NatsServer
) -> None:
    """And all is overwritten then: the list that comes is shorter, and the changes follow."""

    def delete() -> list[str]:
        listed_workload.write(COUNT, size=1000)
        return listed_workload.delete_consumers()

    last = listed_workload.last_values()
    harm = DeletedEarly(delete)
    with Proxy(shared_server.port, harm) as proxy, listed_workload.reading(proxy.url) as reading:
        assert reading.plan()
        rows = reading.read()
        assert harm.gone == proxy.created[:1]
        assert len(proxy.created) > 1
        assert len(rows) < len(last)
        reading.until(listed_workload.last)
    listed_workload.check_readings(reading)


def test_a_restart_in_the_middle_of_changes(hot_workload: Workload) -> None:
    """The second reading goes on with the first one's offsets, and repeats no list."""
    with hot_workload.reading() as first:
        first.until(hot_workload.last)
        hot_workload.write(COUNT)
    with hot_workload.reading(offsets=first.offsets) as second:
        assert second.plan()
        hot_workload.write(COUNT)
        second.read()
        second.until(hot_workload.last)
    hot_workload.check_readings(first, second)
    assert len(first.rows) < COUNT
