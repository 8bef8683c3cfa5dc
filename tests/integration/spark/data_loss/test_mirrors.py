"""A mirror that lacks what a query has read, and receives it again from its origin, or not.

=============================  =====================================================================
event                          what a query makes of it, also with ``failOnDataLoss=false``
=============================  =====================================================================
mirror re-created, or put      waits, with a warning, until the mirror has caught up; then the later
back by an older backup        messages, none twice
=============================  =====================================================================

If the mirror makes no progress for ``outageTimeout``, it is compared as any other stream:

=============================  =====================================================================
event                          error; with ``failOnDataLoss=false`` a new epoch with
=============================  =====================================================================
re-created, origin deleted     re-created; all messages of the mirror
re-created, origin rolled back rolled back; the messages after those that are left
re-created with its origin     re-created, at once; all messages of the mirror
=============================  =====================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from nats_stream_source.errors import DataLossError
from nats_stream_source.options import kv_options
from tests.support.nats.backup import Restore, back_up
from tests.support.nats.buckets import api
from tests.support.nats.topology import make_mirror, wait_for_seq
from tests.support.query_driver.driver import OffsetJson, QueryDriver
from tests.support.recorded_stream import KINDS_IN_TURN, RecordedStream, warnings
from tests.support.wait import wait_until

pytestmark = pytest.mark.servers

FIRST, SECOND, AFTER = 40, 20, 15
"""Messages before the origin's backup, then before the event, and after the event."""
READ = FIRST + SECOND
ACCEPT = {"failOnDataLoss": "false"}
WAITING, BACK = "mirror is behind the query, waiting for it", "mirror has caught up"
LONG, SHORT = 120.0, 0.5
"""Seconds of ``outageTimeout``. A mirror looks for a missing origin about every ten."""


class Mirror:
    """A mirror of a recorded stream, and queries of it."""

    def __init__(self, kind: str, url: str) -> None:
        self.origin = RecordedStream(kind, url).create()
        self.own = RecordedStream(kind, url)
        self.stream = self.own.stream
        self.origin.write(FIRST)
        self.restore_origin: Restore = back_up(url, self.origin.stream)
        history = {"max_msgs_per_subject": self.origin.history} if self.origin.is_kv else {}
        made = make_mirror(url, self.stream, self.origin.stream, allow_direct=True, **history)
        self._config: dict[str, Any] = made["config"]

    def recreate(self) -> None:
        api(self.own.url, f"STREAM.DELETE.{self.stream}")
        api(self.own.url, f"STREAM.CREATE.{self.stream}", self._config)

    @property
    def last(self) -> int:
        return int(self.own.state()["last_seq"])

    def catch_up(self) -> None:
        wait_for_seq(self.own.url, self.stream, self.origin.last)

    def write(self, count: int) -> None:
        self.origin.write(count)
        self.catch_up()

    def query(
        self, offsets: Iterable[OffsetJson] = (), *, timeout: float = LONG, **options: str
    ) -> QueryDriver:
        return self.own.query(offsets=offsets, outage_timeout=timeout, **options)

    def read(self, **options: str) -> list[OffsetJson]:
        """The offsets of a query that has read all messages."""
        with self.query(**options) as query:
            query.until(self.origin.last)
        return query.offsets


@pytest.fixture(params=KINDS_IN_TURN)
def mirror(request: pytest.FixtureRequest, url: str) -> Mirror:
    return Mirror(request.param, url)


@pytest.mark.parametrize(
    "moment",
    ["running", *(pytest.param(m, marks=pytest.mark.faults) for m in ("planned", "available now"))],
)
def test_mirror_recreated(mirror: Mirror, moment: str, caplog: pytest.LogCaptureFixture) -> None:
    """The origin is absent at first, so that the mirror is empty when the queries poll it."""
    mirror.write(SECOND)
    restore = back_up(mirror.own.url, mirror.origin.stream)
    with mirror.query() as strict, mirror.query(**ACCEPT) as accepting:
        queries = strict, accepting
        for query in queries:
            query.until(READ)
        if moment == "planned":
            mirror.write(AFTER)
            restore = back_up(mirror.own.url, mirror.origin.stream)
            assert [query.plan() for query in queries] == [True, True]

        def absent() -> None:
            mirror.recreate()
            for query in queries if moment == "running" else ():
                assert query.drain() == []
                assert query.seq == READ

        restore(absent)
        if moment == "planned":
            restarts = [mirror.query(query.offsets, **ACCEPT) for query in queries]
            for query, restarted in zip(queries, restarts, strict=True):
                with restarted:
                    assert query.logged is not None
                    restarted.plan_logged(query.logged)
                    restarted.read()
                mirror.origin.check(restarted.rows, after=READ)
                query.read()
        if moment == "available now":
            for query in queries:
                query.prepare_available_now()
                assert query.drain() == []  # the end of its run is before its position
                assert mirror.last == READ
            queries = mirror.query(strict.offsets), mirror.query(accepting.offsets, **ACCEPT)
        mirror.catch_up()
        if moment != "planned":
            mirror.write(AFTER)
        for query in queries:
            with query:
                query.until(READ + AFTER)
                query.drain()
                rows = query.rows[0 if moment == "available now" else READ :]
                mirror.origin.check(rows, after=READ)
                assert query.offsets[-1]["epoch"] == 0
    logged = warnings(caplog)
    if moment == "running":
        assert len([text for text in logged if WAITING in text]) >= 2
        assert len([text for text in logged if BACK in text]) == 2
    assert not [text for text in logged if "data loss accepted" in text]


def test_mirror_of_older_backup(mirror: Mirror) -> None:
    """The mirror catches up within a moment, perhaps after the first poll."""
    restore = back_up(mirror.own.url, mirror.stream)
    mirror.write(SECOND)
    with mirror.query() as strict, mirror.query(**ACCEPT) as accepting:
        for query in (strict, accepting):
            query.until(READ)
        restore()
        for query in (strict, accepting):
            assert not query.plan()
        mirror.catch_up()
        mirror.write(AFTER)
        for query in (strict, accepting):
            query.until(READ + AFTER)
            mirror.origin.check(query.rows[READ:], after=READ)
            assert query.offsets[-1]["epoch"] == 0


def origin_deleted(mirror: Mirror) -> None:
    api(mirror.own.url, f"STREAM.DELETE.{mirror.origin.stream}")
    mirror.recreate()
    mirror.origin.remove_after(0)


def origin_rolled_back(mirror: Mirror) -> None:
    mirror.restore_origin()
    mirror.origin.remove_after(FIRST)
    mirror.recreate()
    mirror.catch_up()


def origin_recreated(mirror: Mirror) -> None:
    api(mirror.own.url, f"STREAM.DELETE.{mirror.origin.stream}")
    mirror.origin.remove_after(0)
    mirror.origin.create()
    mirror.origin.write(FIRST)
    mirror.recreate()
    mirror.catch_up()


STUCK = f"; the mirror made no progress for {SHORT:g} s"
EVENTS = {
    "origin deleted": (origin_deleted, f"deleted and re-created: .*{STUCK}", 0),
    "origin rolled back": (
        origin_rolled_back,
        rf"rolled back: .* {FIRST}\b.*{STUCK}",
        FIRST,
    ),
    "origin re-created": (origin_recreated, r"deleted and re-created: [^;]*; set", 0),
}


@pytest.mark.parametrize("moment", ["running", "available now", "logged"])
@pytest.mark.parametrize(("happen", "error", "left"), EVENTS.values(), ids=EVENTS)
def test_mirror_does_not_catch_up(
    mirror: Mirror,
    happen: Callable[[Mirror], None],
    error: str,
    left: int,
    moment: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    mirror.write(SECOND)
    offsets = mirror.read()
    logged = None
    if moment == "logged":
        mirror.write(AFTER)
        with mirror.query(offsets) as planned:
            assert planned.plan()
            logged = planned.logged
    happen(mirror)

    def plan(query: QueryDriver) -> None:
        if logged is not None:
            query.plan_logged(logged)
            query.read()
        elif moment == "available now":
            query.prepare_available_now()
            assert query.plan()
            query.read()
        else:
            wait_until(query.plan, "an end of the query")

    with mirror.query(list(offsets), timeout=SHORT) as strict:
        with pytest.raises(DataLossError, match=error):
            plan(strict)
        assert strict.seq == READ
    waited = [text for text in warnings(caplog) if WAITING in text]
    assert bool(waited) == (STUCK in error)
    with mirror.query(offsets, timeout=SHORT, **ACCEPT) as accepting:
        if moment != "running":
            plan(accepting)
    with mirror.query(accepting.offsets, timeout=SHORT, **ACCEPT) as later:
        wait_until(lambda: in_new_epoch(later), "a new epoch")
        if happen is not origin_deleted:
            mirror.write(AFTER)
        later.until(mirror.origin.last)
    mirror.origin.check(accepting.rows + later.rows, after=left)
    assert any("data loss accepted" in text for text in warnings(caplog))


def in_new_epoch(query: QueryDriver) -> bool:
    """Whether the query has begun a new epoch, after its next micro-batch if there is one."""
    if query.plan():
        query.read()
    return bool(query.offset["epoch"] == 1)


def test_mirror_of_several_is_awaited_alone(url: str) -> None:
    """The other bucket is read while the mirror lags, and the loss names the mirror."""
    mirror, other = Mirror("kv", url), RecordedStream("kv", url)
    other.create()
    options = kv_options(
        {
            "servers": url,
            "buckets": f"{mirror.own.name},{other.name}",
            "includeHistory": "true",
        }
    )
    with QueryDriver(options, outage_timeout=LONG) as query:
        assert query.read_sequences() == {mirror.own.name: [*range(1, FIRST + 1)]}
        origin_deleted(mirror)
        other.write(AFTER)
        assert query.read_sequences() == {other.name: [*range(1, AFTER + 1)]}
        assert query.positions == {mirror.stream: FIRST, other.stream: AFTER}
    with QueryDriver(options, [query.offset], outage_timeout=SHORT) as query:
        lost = pytest.raises(DataLossError, match=f"stream {mirror.stream}: .*{STUCK}")
        with lost:
            wait_until(query.plan, "an end of the query")
