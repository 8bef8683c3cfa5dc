"""Keys that are overwritten around a read, and data loss and restores through Spark.

A list of last values has holes everywhere, so that one that went on by sequence after a fault would
have rows that no list has. What comes after it is a row each, unless it was superseded before its
micro-batch was read. See ``row_check.check_batches``. Each data loss is a real one, and its action
verifies that it happened; ``tests/integration/spark/data_loss`` has all cases.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nats_stream_source.embedded import NatsServer
from tests.faults.conftest import NewRecordedStream
from tests.support.nats import buckets
from tests.support.nats.backup import back_up
from tests.support.proxy.fault_proxy import Proxy
from tests.support.proxy.verdicts import ConsumerDeletedEarly, FrameFault, Last, Nth, When
from tests.support.recorded_stream import RecordedStream, warnings
from tests.support.spark.scenario import (
    Action,
    Backup,
    Create,
    Do,
    ExpectError,
    ExpectRows,
    Put,
    Recreate,
    Restore,
    Run,
    Scene,
    Start,
    Stop,
    Wait,
    play,
)

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


# -- superseded before the consumer has delivered them ---------------------------------------------


# The server makes the list when the consumer is created. Where it comes to a message that was
# superseded or purged since, it waits for its own next heartbeat, and then moves on by that one:
# 600 of them would take five minutes.
LISTED, SIZE = 6000, 5000  # 30 MB: more than the server sends to a reader that pauses
GONE = range(5200, 5800)


def overwrite(recorded: RecordedStream) -> None:
    """Twice: of two messages of a key, the listed one was removed."""
    for value in (b"older", b"newer"):
        buckets.publish(recorded.url, [(f"{recorded.prefix}k{n}", value, None) for n in GONE])


def purge(recorded: RecordedStream) -> None:
    """As TTLs without markers do it."""
    for n in GONE:
        buckets.api(
            recorded.url, f"STREAM.PURGE.{recorded.stream}", {"filter": f"{recorded.prefix}k{n}"}
        )


REMOVALS: dict[str, tuple[Callable[[RecordedStream], None], bytes | None]] = {
    "overwritten": (overwrite, b"newer"),
    "purged": (purge, None),
}


@pytest.mark.parametrize("what", REMOVALS)
def test_listed_stream_is_deleted(
    shared_server: NatsServer, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    fault, then = REMOVALS[what]
    recorded = RecordedStream("kv current", shared_server.url).create(history=2)
    recorded.write(LISTED, SIZE)
    injected: list[int] = []

    def once(rows: int) -> None:
        if not injected:
            injected.append(rows)
            fault(recorded)

    with recorded.query() as query:
        assert query.plan()
        (split,) = query.splits
        assert split.range.last_per_subject
        listed = query.read(once)
        query.drain()
    assert injected
    assert injected[0] < GONE.start
    assert len(listed.rows) == LISTED - len(GONE)
    stale = [text for text in warnings(caplog) if "stale list" in text]
    assert 1 <= len(stale) < 5
    seqs = [row.seq for row in query.rows]
    assert sorted(set(seqs)) == seqs
    expected: dict[str, bytes | None] = dict(recorded.acknowledged.values())
    expected.update((f"k{n}", then) for n in GONE)
    latest = {row.key: row.value for row in query.rows}
    assert latest == {key: value for key, value in expected.items() if value is not None}


ACCEPT = {"failOnDataLoss": False}
READ = ("1 PUT a=1 initial", "2 PUT b=1 initial", "3 PUT c=1 initial")


def puts(*keys: str) -> tuple[Action, ...]:
    return tuple(Put(key, "1") for key in keys)


def after_batch(scene: Scene, batch_id: int, *actions: Action) -> Start:
    """Start a query; run the actions in its sink, while the planner does not poll."""

    def run(current: int) -> None:
        if current == batch_id:
            play(scene, *actions)

    return Start(after=run)


RESTORE = Do(lambda scene: back_up(scene.url, scene.stream)())


def test_bucket_recreated_while_query_runs(scene: Scene) -> None:
    play(
        scene,
        Create(),
        *puts("a", "b", "c"),
        after_batch(scene, 0, Recreate(), *puts("x", "y")),
        ExpectError("DataLossError", ("deleted and re-created", "failOnDataLoss=false"), rows=3),
        Run(ACCEPT),
        Put("z", "1"),
        Run(),  # the accepted loss is not reported again
        ExpectRows(*READ, "1 PUT x=1", "2 PUT y=1", "3 PUT z=1"),
    )


def test_bucket_rolled_back_while_query_runs(own_scene: Scene) -> None:
    play(
        own_scene,
        Create(),
        *puts("a", "b", "c"),
        Backup(),
        after_batch(own_scene, 1, Restore(), Put("x", "1")),
        Wait(rows=3),
        Put("d", "1"),
        ExpectError("DataLossError", ("was rolled back", "failOnDataLoss=false"), rows=4),
        Run(ACCEPT),
        ExpectRows(*READ, "4 PUT d=1", "4 PUT x=1"),
    )


def test_bucket_restored_while_query_is_stopped(scene: Scene) -> None:
    play(
        scene,
        Create(),
        *puts("a", "b", "c"),
        Run(),
        Put("d", "1"),
        RESTORE,
        Put("e", "1"),
        Run(),
        ExpectRows(*READ, "4 PUT d=1", "5 PUT e=1"),
    )


def test_bucket_restored_while_query_runs(scene: Scene) -> None:
    play(
        scene,
        Create(),
        *puts("a", "b", "c"),
        after_batch(scene, 0, Put("d", "1"), RESTORE),
        Wait(rows=4),
        Put("e", "1"),
        Wait(rows=5),
        Stop(),
        ExpectRows(*READ, "4 PUT d=1", "5 PUT e=1"),
    )
