"""Few keys, written over and over: before they are read, in the middle of it, and afterwards.

A list of last values has holes everywhere, so that one that went on by sequence after a fault would
have rows that no list has. What comes after it is a row each, unless it was superseded before its
micro-batch was read. See ``oracle.check_all_came``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from faults.harm import DeletedEarly, Harm, Last, Nth, When
from faults.proxy import Proxy
from faults.trial import Trial
from nats_stream_source.embedded import NatsServer

KEYS, COUNT = 300, 1500

HOT = {
    "list": ("kv current", 64),
    "kept once": ("kv current", 1),  # a range with holes, not a list
    "history": ("kv", 64),
}


@pytest.fixture(params=HOT)
def trial(request: pytest.FixtureRequest, shared_server: NatsServer) -> Trial:
    kind, history = HOT[request.param]
    trial = Trial(kind, shared_server.url, hot=KEYS).create(history=history)
    trial.write(COUNT, size=1000)
    return trial


@pytest.fixture
def listed(shared_server: NatsServer) -> Trial:
    """One whose initial values are a list."""
    trial = Trial("kv current", shared_server.url, hot=KEYS).create()
    trial.write(COUNT, size=1000)
    return trial


LOST: dict[str, Callable[[], Harm]] = {
    "first": lambda: Nth([1]),
    "one": lambda: Nth([120]),
    "many": lambda: Nth([20, 180, 420, 700, 1000]),
    "only the last": Last,
    "the last hundred": lambda: Nth(range(170, 270)),
}


@pytest.mark.parametrize("which", LOST)
def test_messages_are_lost(trial: Trial, shared_server: NatsServer, which: str) -> None:
    """Of the initial values, and of the changes that follow."""
    with Proxy(shared_server.port) as proxy, trial.reading(proxy.url) as reading:
        for _ in range(2):
            before = len(proxy.created)
            proxy.verdict = harm = LOST[which]()
            assert reading.plan()
            reading.read()
            assert reading.seq == trial.last
            assert harm.done > 0
            assert len(proxy.created) - before > 1
            trial.write(COUNT, size=1000)
        proxy.verdict = lambda frame: True
        reading.until(trial.last)
        assert set(proxy.created) == set(proxy.deleted)
    trial.check_readings(reading)
    assert [batch.listed for batch in reading.done] == [
        trial.kind == "kv current" and trial.history > 1,
        *(False for _ in reading.done[1:]),
    ]
    assert trial.consumers() == []


def overwritten(trial: Trial) -> Callable[[], None]:
    return lambda: trial.write(COUNT, size=1000)


def overwritten_and_deleted(trial: Trial) -> Callable[[], None]:
    def act() -> None:
        trial.write(COUNT, size=1000)
        assert trial.delete_consumers()

    return act


@pytest.mark.parametrize("lose", [False, True], ids=["", "the rest is lost"])
@pytest.mark.parametrize("act", [overwritten, overwritten_and_deleted])
def test_a_list_is_overwritten_while_it_is_read(
    listed: Trial,
    shared_server: NatsServer,
    act: Callable[[Trial], Callable[[], None]],
    lose: bool,
) -> None:
    """What had not come goes on where it stands now, after the list: nothing comes twice."""
    last = listed.last_values()
    harm = When(last[len(last) // 2], act(listed), lose=lose)
    with Proxy(shared_server.port, harm) as proxy, listed.reading(proxy.url) as reading:
        assert reading.plan()
        rows = reading.read()
        assert harm.consumer
        assert {row.seq for row in rows} <= set(last)
        if lose:
            assert len(proxy.created) > 1
            assert len(rows) < len(last)
        reading.until(listed.last)
    listed.check_readings(reading)
    assert listed.consumers() == []


def test_the_consumer_of_a_list_is_deleted_before_its_first_message(
    listed: Trial, shared_server: NatsServer
) -> None:
    """And all is overwritten then: the list that comes is shorter, and the changes follow."""

    def delete() -> list[str]:
        listed.write(COUNT, size=1000)
        return listed.delete_consumers()

    last = listed.last_values()
    harm = DeletedEarly(delete)
    with Proxy(shared_server.port, harm) as proxy, listed.reading(proxy.url) as reading:
        assert reading.plan()
        rows = reading.read()
        assert harm.gone == proxy.created[:1]
        assert len(proxy.created) > 1
        assert len(rows) < len(last)
        reading.until(listed.last)
    listed.check_readings(reading)


def test_a_restart_in_the_middle_of_changes(trial: Trial) -> None:
    """The second reading goes on with the first one's offsets, and repeats no list."""
    with trial.reading() as first:
        first.until(trial.last)
        trial.write(COUNT)
    with trial.reading(offsets=first.offsets) as second:
        assert second.plan()
        trial.write(COUNT)
        second.read()
        second.until(trial.last)
    trial.check_readings(first, second)
    assert len(first.rows) < COUNT
