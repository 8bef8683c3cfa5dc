"""What is read after an event of a stream: each event at each moment, by each kind of read.

=====================  ==================================  =========================================
event                  query stopped or running            planned, and not yet read; batch
=====================  ==================================  =========================================
same, restored         the later messages                  the planned messages
re-created             error; or all messages, new epoch   error; then as a stopped query
rolled back, older     error; or the later messages, new   error; then as a stopped query
backup                 epoch
aged out               error; or the messages that are     error; or the messages that are left
                       left
=====================  ==================================  =========================================

The errors are those of ``failOnDataLoss=true``, the alternatives those of ``false``. Messages that
aged out are not a loss to a read of current values. Rolled back is a store that was put back to an
earlier copy; a restored stream and the one of an older backup come through the server's API.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import DataLossError
from nats_stream_source.jetstream.times import nanoseconds
from tests.support.nats.backup import back_up, restore_changes_created
from tests.support.nats.buckets import api
from tests.support.nats.store_files import keep_store
from tests.support.oracle.row_check import Row
from tests.support.query_driver.batch import read_sorted
from tests.support.query_driver.driver import QueryDriver, new_query
from tests.support.recorded_stream import KINDS, KINDS_IN_TURN, RecordedStream, purge, warnings

pytestmark = pytest.mark.servers

FIRST, SECOND, AFTER = 40, 20, 15
"""Messages before the earlier copy, then before the event, and after the event."""
KEPT = SECOND + AFTER - 1
"""Messages that do not age out: the loss is the smallest one, one message."""


@dataclass
class Scene:
    """A stream with FIRST messages, then SECOND more, then an event.

    Attributes:
        roll_back: puts the stream back to its first FIRST messages.
    """

    recorded: RecordedStream
    roll_back: Callable[[], None]

    def same(self) -> None:
        self.recorded.write(AFTER)

    def restored(self) -> None:
        back_up(self.recorded.url, self.recorded.stream)()
        self.recorded.write(AFTER)

    def recreated(self) -> None:
        api(self.recorded.url, f"STREAM.DELETE.{self.recorded.stream}")
        self.recorded.acknowledged.clear()
        self.recorded.create()
        self.recorded.write(FIRST + SECOND + AFTER)

    def rolled_back(self) -> None:
        self.roll_back()
        assert self.recorded.state()["last_seq"] == FIRST
        self.recorded.remove_after(FIRST)
        self.recorded.write(SECOND + AFTER)  # as far as before, and further

    def aged_out(self) -> None:
        self.recorded.write(AFTER)
        purge(self.recorded, keep=KEPT)

    @property
    def lost(self) -> range:
        """The unread messages that aged out after ``FIRST`` were read."""
        return range(FIRST + 1, self.recorded.last - KEPT + 1)


@dataclass(frozen=True)
class Event:
    """An event and what a query makes of it.

    Attributes:
        error: the error's text; None where no message is lost.
        read_after: the sequence after which an accepting query reads; None for its position.
    """

    happen: Callable[[Scene], None]
    error: str | None = None
    read_after: int | None = None
    epoch: int = 0

    def fails(self, recorded: RecordedStream) -> bool:
        ages = self.error == AGED_OUT
        return self.error is not None and not (ages and recorded.kind == "kv current")


AGED_OUT = rf"\b{FIRST + 1} to {FIRST + 1} aged out"
EVENTS = {
    "same": Event(Scene.same),
    "restored": Event(Scene.restored),
    "re-created": Event(Scene.recreated, "deleted and re-created", read_after=0, epoch=1),
    "rolled back": Event(Scene.rolled_back, "rolled back", read_after=FIRST, epoch=1),
    "older backup": Event(Scene.rolled_back, "rolled back", read_after=FIRST, epoch=1),
    "aged out": Event(Scene.aged_out, AGED_OUT),
}
ACCEPT = {"failOnDataLoss": "false"}


@pytest.fixture(params=EVENTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def event(name: str) -> Event:
    return EVENTS[name]


@pytest.fixture(params=KINDS_IN_TURN)
def scene(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> Iterator[Scene]:
    own = name == "rolled back"  # its server is killed
    server: NatsServer = request.getfixturevalue("nats_server" if own else "shared_server")
    recorded = RecordedStream(request.param, server.url).create()
    recorded.write(FIRST)
    copy = keep_store(server, tmp_path) if own else back_up(server.url, recorded.stream)
    yield Scene(recorded, copy)
    assert recorded.consumers() == []
    api(recorded.url, f"STREAM.DELETE.{recorded.stream}")


def created(recorded: RecordedStream) -> str:
    return str(api(recorded.url, f"STREAM.INFO.{recorded.stream}")["created"])


def check_accepted(
    scene: Scene, event: Event, query: QueryDriver, rows: list[Row], position: int
) -> None:
    """Compare the rows and the offset of a query that resumes after ``position``."""
    after = position if event.read_after is None else event.read_after
    lost = scene.lost if event.error == AGED_OUT else ()
    scene.recorded.check(rows, after=after, lost=[seq for seq in lost if seq > after])
    last = query.offsets[-1]
    assert (last["epoch"], last["created"]) == (event.epoch, created(scene.recorded))


@pytest.mark.parametrize("moment", ["stopped", "running"])
def test_query_stopped_or_running(
    scene: Scene, event: Event, name: str, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = scene.recorded
    end = FIRST if event.error == AGED_OUT else FIRST + SECOND  # what ages out is not read
    with recorded.query() as strict, recorded.query(**ACCEPT) as accepting:
        recorded.write(end - FIRST)
        for query in (strict, accepting):
            query.until(end)
        recorded.write(FIRST + SECOND - end)
        before = created(recorded)
        event.happen(scene)
        changed = created(recorded) != before
        if moment == "running":
            caplog.clear()
            _read_after(scene, event, strict, accepting, end)
    if moment == "stopped":
        caplog.clear()
        with (
            recorded.query(offsets=strict.offsets) as strict,
            recorded.query(offsets=accepting.offsets, **ACCEPT) as accepting,
        ):
            _read_after(scene, event, strict, accepting, end)
        logged_restores = [text for text in warnings(caplog) if "restored from a backup" in text]
        assert len(logged_restores) == (
            2 if name == "restored" and changed else 0
        )  # one by each query
    if name == "restored":
        assert changed == restore_changes_created(recorded.url)
    accepted = [text for text in warnings(caplog) if event.error and re.search(event.error, text)]
    assert len(accepted) == event.fails(recorded)


def _read_after(
    scene: Scene, event: Event, strict: QueryDriver, accepting: QueryDriver, end: int
) -> None:
    read = len(accepting.rows)
    accepting.drain()
    rows = accepting.rows[read:]
    check_accepted(scene, event, accepting, rows, end)
    micros = {round(row.created.timestamp() * 1e6) for row in rows}
    assert micros == {nanoseconds(created(scene.recorded)) // 1000}
    if event.fails(scene.recorded):
        with pytest.raises(DataLossError, match=event.error):
            strict.plan()
        return
    strict.drain()
    check_accepted(scene, event, strict, strict.rows[read:], end)


def test_planned_range(scene: Scene, event: Event) -> None:
    """A micro-batch that was planned before the event is read after it, then logged and read."""
    recorded = scene.recorded
    with recorded.query() as strict, recorded.query(**ACCEPT) as accepting:
        for query in (strict, accepting):
            query.until(FIRST)
        recorded.write(SECOND)
        for query in (strict, accepting):
            assert query.plan()
        offsets, logged = list(accepting.offsets), accepting.logged
        assert logged is not None
        event.happen(scene)
        if event.fails(recorded):
            with pytest.raises(DataLossError, match=event.error):
                strict.read()
        else:
            strict.read()
            strict.drain()
            check_accepted(scene, event, strict, strict.rows[FIRST:], FIRST)
        if event.epoch:  # rows of two streams are not mixed under any setting
            with pytest.raises(DataLossError, match=event.error):
                accepting.read()
        else:
            accepting.read()
            accepting.drain()
            check_accepted(scene, event, accepting, accepting.rows[FIRST:], FIRST)
    if event.fails(recorded):
        error = f"{event.error}.*planned but not finished" if event.epoch else event.error
        lost = pytest.raises(DataLossError, match=error)
        with recorded.query(offsets=list(offsets)) as refused, lost:
            refused.plan_logged(logged)
    with recorded.query(offsets=offsets, **ACCEPT) as restarted:
        restarted.plan_logged(logged)
        restarted.read()
        restarted.drain()
    check_accepted(scene, event, restarted, restarted.rows, FIRST)


@pytest.mark.parametrize("accept", [False, True], ids=["strict", "accepting"])
def test_planned_batch(scene: Scene, event: Event, accept: bool) -> None:
    recorded = scene.recorded
    recorded.write(SECOND)
    options = recorded.options(recorded.url, **(ACCEPT if accept else {}))
    if recorded.kind != "kv current":
        options["minPartitions"] = "2"

    def read() -> list[Row]:
        return read_sorted(recorded.url, options, planned=lambda: event.happen(scene))

    if event.epoch or (event.fails(recorded) and not accept):
        # A batch reads from the first message, so more of it is lost than to a query.
        error = r"\b1 to \d+ aged out" if event.error == AGED_OUT else event.error
        with pytest.raises(DataLossError, match=error):
            read()
        return
    rows = read()
    through = FIRST + SECOND
    lost = range(1, scene.lost.stop) if event.error == AGED_OUT else ()
    recorded.check(rows, through=through, lost=lost)


@pytest.mark.parametrize("older", [False, True], ids=["restored", "older backup"])
def test_stream_of_several_polled_during_its_restore(
    url: str, older: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A restore deletes the stream first: an accepting query keeps its position meanwhile."""
    recorded, other = (RecordedStream("kv", url).create() for _ in "ab")
    recorded.write(FIRST)
    restore = back_up(recorded.url, recorded.stream)
    recorded.write(SECOND)
    if not older:
        restore = back_up(recorded.url, recorded.stream)
    names = {"buckets": f"{recorded.name},{other.name}", "includeHistory": True}
    with (
        new_query(recorded.url, **names) as strict,
        new_query(recorded.url, **names, **ACCEPT) as accepting,
    ):
        for query in (strict, accepting):
            assert query.read_sequences() == {recorded.name: [*range(1, FIRST + SECOND + 1)]}
        read = strict.offset

        def poll() -> None:
            with pytest.raises(DataLossError, match=rf"{recorded.stream}: stream was deleted"):
                strict.plan()
            other.write(AFTER)
            assert accepting.read_sequences() == {other.name: [*range(1, AFTER + 1)]}
            assert accepting.positions == {other.stream: AFTER}

        restore(poll)
        if older:
            recorded.remove_after(FIRST)
        start = recorded.last + 1
        recorded.write(AFTER)
        caplog.clear()
        assert accepting.read_sequences() == {recorded.name: [*range(start, recorded.last + 1)]}
        assert any("rolled back" in text for text in warnings(caplog)) == older
    with new_query(recorded.url, **names, offset=read) as restarted:
        if older:
            with pytest.raises(DataLossError, match="rolled back"):
                restarted.plan()
            return
        after = {recorded.name: [*range(start, recorded.last + 1)]}
        assert restarted.read_sequences() == after | {other.name: [*range(1, AFTER + 1)]}


@pytest.mark.parametrize("kind", KINDS)
def test_messages_purged_after_they_were_read(
    url: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorded = RecordedStream(kind, url).create()
    recorded.write(FIRST)
    with recorded.query() as first:
        first.until(FIRST)
    purge(recorded, keep=0)
    recorded.write(AFTER)
    caplog.clear()
    with recorded.query(offsets=first.offsets) as second:
        second.drain()
    recorded.check(first.rows + second.rows)
    assert not [text for text in warnings(caplog) if "aged out" in text]


@pytest.mark.parametrize("kind", ["kv", "stream"])
def test_history_purged_before_first_micro_batch_is_read(url: str, kind: str) -> None:
    """A query that has read no row starts at the oldest message that is left."""
    recorded = RecordedStream(kind, url).create()
    recorded.write(FIRST)
    with recorded.query() as first:
        assert first.plan()
        offsets, logged = list(first.offsets), first.logged
        assert logged is not None
    purge(recorded, keep=FIRST // 2)
    with recorded.query(offsets=offsets) as second:
        second.plan_logged(logged)
        second.read()
        second.drain()
    recorded.check(second.rows, after=FIRST - FIRST // 2)


@pytest.mark.parametrize("kind", KINDS)
def test_recreated_stream_grown_past_superseded_checkpoint(url: str, kind: str) -> None:
    """The message at the checkpoint's sequence was superseded in the re-created stream."""
    recorded = RecordedStream(kind, url).create(max_msgs_per_subject=1)
    recorded.write(FIRST)
    with recorded.query() as first:
        first.until(FIRST)
    api(recorded.url, f"STREAM.DELETE.{recorded.stream}")
    recorded.acknowledged.clear()
    recorded.create(max_msgs_per_subject=1)
    recorded.write(FIRST + SECOND)
    key = recorded.acknowledged.pop(FIRST)[0]
    recorded.put([(key, b"again")])
    lost = pytest.raises(DataLossError, match="deleted and re-created")
    with recorded.query(offsets=list(first.offsets)) as refused, lost:
        refused.plan()
    with recorded.query(offsets=first.offsets, **ACCEPT) as second:
        second.drain()
    assert sorted(row.seq for row in second.rows) == sorted(recorded.acknowledged)


@pytest.mark.parametrize("kind", KINDS)
def test_restored_stream_whose_checkpoint_was_superseded(url: str, kind: str) -> None:
    """The backup has another message of the checkpoint's key, or none up to the checkpoint."""
    recorded = RecordedStream(kind, url).create(max_msgs_per_subject=1)
    recorded.write(FIRST)
    with recorded.query() as first:
        first.until(FIRST)
    recorded.put([(recorded.acknowledged[FIRST][0], b"again")])
    back_up(recorded.url, recorded.stream)()
    recorded.write(AFTER)
    with recorded.query(offsets=first.offsets) as second:
        second.drain()
    recorded.check(second.rows, after=FIRST)
    assert second.offsets[-1]["created"] == created(recorded)
