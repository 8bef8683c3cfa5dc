"""What the scenarios have in common: writes with PubAcks, reads as Spark would, and the oracle.

A :class:`Trial` is one bucket or stream. Every write is unique and numbered, and its PubAck is
awaited. A :class:`Reading` asks planner and reader what Spark asks, in Spark's order, offsets
through JSON and splits through pickle; a second reading with the first one's offsets is a restart.
The oracle (:meth:`Trial.check`): what was acknowledged was read, exactly once and in order, and
nothing was read that was not written.

Three kinds of trials: ``kv`` reads all revisions of a bucket, ``kv current`` the last ones (an
ordered consumer of ``last_per_subject``, since the bucket keeps more than one; each key is written
once here, so that all are last), ``stream`` the messages of a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import pickle
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import buckets
import nats.errors
import pyarrow as pa
import pytest
from loops import run
from nats.js.client import JetStreamContext
from nats.js.errors import Error as JetStreamError

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream import link, ordered
from nats_stream_source.jetstream.patience import patiently
from nats_stream_source.options import KvOptions, StreamOptions, kv_options, stream_options
from nats_stream_source.source import reader
from nats_stream_source.source.offsets import Offset
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.planner import Planner
from nats_stream_source.source.query import query_of
from nats_stream_source.source.reader import read_split
from nats_stream_source.source.runtime import Runner, drop_kept_runners

T = TypeVar("T")

Each = Callable[[int], None]
"""Called between record batches, with how many rows there are so far."""

KINDS = ("kv", "kv current", "stream")
KINDS_IN_TURN = (
    "kv",
    pytest.param("kv current", marks=pytest.mark.faults),
    pytest.param("stream", marks=pytest.mark.faults),
)
"""For tests that take seconds: one kind with the fast ones, all with ``make test-faults``."""


def crash(server: NatsServer) -> None:
    """Kill a server and start it again."""
    server.kill()
    server.start()


def keep_store(server: NatsServer, directory: Path) -> Callable[[], None]:
    """Keep a server's store in ``directory``; call what this gives to put it in place again.

    So does a server that lost power before its fsync, or a backup: acknowledged writes are gone.
    """
    store, kept = server.store / "jetstream", directory / "kept"
    server.terminate()
    shutil.copytree(store, kept)
    server.start()

    def restore() -> None:
        server.kill()
        shutil.rmtree(store)
        shutil.copytree(kept, store)
        server.start()

    return restore


AGAIN: dict[str, Callable[[NatsServer], None]] = {"restarted": NatsServer.restart, "killed": crash}
"""How a server goes away and comes back."""

DEADLINE = 600.0
"""Seconds that a reading may take to come somewhere; only a failing test takes that long."""

_serial = itertools.count(1)
_IN_FLIGHT = 100
_NOT_ACKNOWLEDGED = (nats.errors.Error, JetStreamError, OSError, asyncio.TimeoutError)


def be_patient(monkeypatch: pytest.MonkeyPatch, heartbeat: float = 5.0) -> None:
    """Let readers wait for three long heartbeats, and for any PONG, before they rebuild.

    For tests that count consumers or connections: on a busy machine a server may get no processor
    for so long that readers take it for lost, and rightly make new ones.
    """
    monkeypatch.setattr(reader, "RangeRequest", partial(reader.RangeRequest, heartbeat=heartbeat))
    monkeypatch.setattr(link, "_PING_DEADLINE", DEADLINE)
    monkeypatch.setattr(ordered, "_PONG_DEADLINE", DEADLINE)


@dataclass(frozen=True, slots=True)
class Row:
    """A row, whatever the format calls its columns."""

    seq: int
    key: str
    value: bytes | None
    operation: str = "PUT"
    created: Any = None


class Trial:
    """One bucket or stream, and what was written to it.

    Args:
        kind: one of :data:`KINDS`.
        url: the server that is written to.

    Attributes:
        acknowledged: by stream sequence, the key and the value.
        attempted: all values, also those whose PubAck did not come.
    """

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        self.name = f"t{next(_serial)}"
        self.stream = f"KV_{self.name}" if self.is_kv else self.name
        self.acknowledged: dict[int, tuple[str, bytes]] = {}
        self.attempted: set[bytes] = set()
        self._numbers = itertools.count()

    @property
    def is_kv(self) -> bool:
        return self.kind != "stream"

    @property
    def prefix(self) -> str:
        return f"$KV.{self.name}." if self.is_kv else f"{self.name}."

    @property
    def last(self) -> int:
        """The last sequence that was acknowledged."""
        return max(self.acknowledged, default=0)

    def create(self, **config: Any) -> Trial:
        """Create the stream; ``config`` overrides."""
        if self.is_kv:
            buckets.create_bucket(self.url, self.name, config.pop("history", 64), **config)
        else:
            wanted = {"name": self.name, "subjects": [f"{self.name}.>"], "allow_direct": True}
            buckets.api(self.url, f"STREAM.CREATE.{self.name}", {**wanted, **config})
        return self

    def state(self, url: str | None = None) -> dict[str, Any]:
        """The stream's state as its leader has it."""
        info = buckets.api(url or self.url, f"STREAM.INFO.{self.stream}")
        return dict(info["state"])

    def consumers(self, url: str | None = None) -> list[str]:
        answer = buckets.api(url or self.url, f"CONSUMER.NAMES.{self.stream}")
        return list(answer.get("consumers") or [])

    def delete_consumers(self) -> list[str]:
        """Delete them all; their names."""
        names = self.consumers()
        for name in names:
            buckets.api(self.url, f"CONSUMER.DELETE.{self.stream}.{name}")
        return names

    # -- writing ----------------------------------------------------------------------------------

    def messages(self, count: int, size: int = 0) -> list[tuple[str, bytes]]:
        """The next ``count`` keys and values, of ``size`` bytes or a little more."""
        found = []
        for number in itertools.islice(self._numbers, count):
            value = b"%d." % number
            self.attempted.add(value + b"x" * size)
            found.append((f"k{number}", value + b"x" * size))
        return found

    def write(self, count: int, size: int = 0, url: str | None = None) -> None:
        """Write ``count`` values; each must be acknowledged."""
        written = self.messages(count, size)
        sequences = buckets.publish(
            url or self.url, [(self.prefix + key, value, None) for key, value in written]
        )
        self.acknowledged.update(zip(sequences, written, strict=True))

    @contextlib.contextmanager
    def writing(self, urls: Sequence[str], size: int = 100) -> Iterator[Writing]:
        """Write all the time, whatever happens to the servers; what is acknowledged counts."""
        writing = Writing(self, urls, size)
        writing.start()
        try:
            yield writing
        finally:
            writing.stop()

    # -- reading ----------------------------------------------------------------------------------

    def options(self, url: str, **more: str) -> dict[str, str]:
        own = {"bucket": self.name} if self.is_kv else {"stream": self.name}
        if self.kind == "kv":
            own["includeHistory"] = "true"
        return {"servers": url, **own, **more}

    @contextlib.contextmanager
    def reading(
        self, url: str | None = None, offsets: Iterable[dict[str, Any]] = (), **options: str
    ) -> Iterator[Reading]:
        """A query on this, which goes on from the last of ``offsets`` where there are any."""
        given = self.options(url or self.url, **options)
        reading = Reading(kv_options(given) if self.is_kv else stream_options(given), list(offsets))
        try:
            yield reading
        finally:
            reading.stop()

    # -- the oracle -------------------------------------------------------------------------------

    def check(
        self, rows: Sequence[Row], *, lost: Iterable[int] = (), after: int = 0, through: int = -1
    ) -> None:
        """Compare ``rows`` with what was written in ``(after, through]``.

        Args:
            lost: sequences that the server has lost, or that the test took away.
            through: the last acknowledged one when -1.
        """
        through = self.last if through < 0 else through
        seqs = [row.seq for row in rows]
        twice = len(seqs) - len(set(seqs))
        assert not twice, f"{twice} rows were read twice"
        wrong = [b for a, b in itertools.pairwise(seqs) if b <= a]
        assert not wrong, f"out of order: {wrong[:10]}"
        read = {row.seq: row for row in rows}
        gone = set(lost)
        expected = {seq for seq in self.acknowledged if after < seq <= through} - gone
        missing = sorted(expected - read.keys())
        assert not missing, f"{len(missing)} acknowledged writes were not read: {missing[:10]}"
        for seq, row in read.items():
            if seq in self.acknowledged:
                key, value = self.acknowledged[seq]
                assert (row.key, row.value) == (key, value), f"another row at {seq}: {row}"
            else:
                assert row.value in self.attempted, f"never written: {row}"
        again = len(rows) - len({row.value for row in rows})
        assert not again, f"{again} values were read at two sequences"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged that an operator is to read."""
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def told_lost(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What of it is about messages that are lost."""
    return [text for text in warnings(caplog) if "went away" in text]


class Writing(threading.Thread):
    """Writes until it is told to stop; a write that is not acknowledged is not repeated."""

    def __init__(self, trial: Trial, urls: Sequence[str], size: int) -> None:
        super().__init__(daemon=True)
        self._trial = trial
        self._urls = list(urls)
        self._size = size
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.failed = 0

    def run(self) -> None:
        try:
            run(self._write())
        except BaseException as error:  # the thread's end is no place for it: stop() raises it
            self._error = error

    def stop(self) -> None:
        self._over.set()
        self.join(DEADLINE)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error

    def wait(self, count: int) -> None:
        """Wait until ``count`` more writes are acknowledged."""
        target = len(self._trial.acknowledged) + count
        deadline = time.monotonic() + DEADLINE
        while len(self._trial.acknowledged) < target:
            assert self._error is None, self._error
            assert time.monotonic() < deadline, "nothing is acknowledged any more"
            time.sleep(0.01)

    async def _write(self) -> None:
        async def ignore(error: Exception) -> None:
            pass  # servers come and go here

        async with buckets.connected(
            self._urls,
            error_cb=ignore,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            ping_interval=2,
        ) as client:
            await self._write_with(client.jetstream())

    async def _write_with(self, jetstream: JetStreamContext) -> None:
        trial = self._trial

        async def put(key: str, value: bytes) -> None:
            try:
                ack = await jetstream.publish(trial.prefix + key, value, timeout=3)
            except _NOT_ACKNOWLEDGED:
                self.failed += 1
            else:
                trial.acknowledged[ack.seq] = (key, value)

        while not self._over.is_set():
            await asyncio.gather(
                *(put(key, value) for key, value in trial.messages(_IN_FLIGHT, self._size))
            )
            await asyncio.sleep(0.01)


class Reading:
    """A query without Spark, from its options on.

    Attributes:
        offsets: of all micro-batches that were done; the first is where the query began.
        logged: the end of a micro-batch that was planned and not done.
        splits: of that micro-batch.
        rows: of all micro-batches that were done.
    """

    def __init__(self, options: KvOptions | StreamOptions, offsets: list[dict[str, Any]]) -> None:
        self._options = options
        self._query = query_of(options)
        self._runner = Runner(options.connection)
        self._planner = Planner(self._query, self._runner.link)
        self.offsets = offsets
        self.logged: dict[str, Any] | None = None
        self.splits: list[Plan] = []
        self.rows: list[Row] = []

    def _ask(self, question: Callable[[Planner], Awaitable[T]]) -> T:
        seconds = self._options.connection.connect_timeout
        return self._runner.run(patiently(lambda: question(self._planner), seconds))

    @property
    def seq(self) -> int:
        """The sequence up to which was read."""
        return int(self.offsets[-1]["stream_seq"]) if self.offsets else 0

    def _start(self) -> Offset:
        # Also where there is a checkpoint: Spark asks after each restart.
        initial = self._ask(lambda planner: planner.initial())
        if not self.offsets:
            self.offsets.append(_through_json(initial))
        return Offset.parse(self.offsets[-1])

    def plan(self) -> bool:
        """Plan the next micro-batch; False when there is nothing."""
        start, reading = self._start(), self._options.reading
        end = self._ask(lambda planner: planner.latest(start, reading.max_rows, reading.max_bytes))
        if end == start:
            return False
        self.again(_through_json(end))
        return True

    def again(self, logged: dict[str, Any]) -> None:
        """Plan a micro-batch whose end is known, as after a restart before it was done."""
        start, end = self._start(), Offset.parse(logged)
        self.splits = self._ask(lambda planner: planner.plans(start, end))
        self.logged = logged

    def read(self, each: Each | None = None) -> list[Row]:
        """Read what was planned."""
        rows: list[Row] = []
        for split in pickle.loads(pickle.dumps(self.splits)):
            for batch in read_split(split, pickle.loads(pickle.dumps(self._query))):
                rows += rows_of(batch)
                if each is not None:
                    each(len(rows))
        assert self.logged is not None
        self.offsets.append(self.logged)
        self.logged = None
        self.rows += rows
        return rows

    def until(self, seq: int) -> None:
        """Micro-batches until all up to ``seq`` was read."""
        deadline = time.monotonic() + DEADLINE
        while self.seq < seq:
            assert time.monotonic() < deadline, f"read up to {self.seq}, not {seq}"
            if self.plan():
                self.read()

    def drain(self) -> None:
        """Micro-batches until there is nothing more."""
        deadline = time.monotonic() + DEADLINE
        nothing = 0
        while nothing < 3:  # a planner that was not asked for a while says so once, without a look
            assert time.monotonic() < deadline, f"still reading at {self.seq}"
            if self.plan():
                self.read()
                nothing = 0
            else:
                nothing += 1

    def stop(self) -> None:
        """What Spark does at a query's end, in the planner's process and in the workers."""
        self._runner.close()
        drop_kept_runners()


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    columns = batch.to_pydict()
    if "key" in columns:
        names = ("revision", "key", "value", "operation", "stream_created")
        return [Row(*values) for values in zip(*(columns[name] for name in names), strict=True)]
    rows = zip(
        columns["sequence"],
        columns["subject"],
        columns["data"],
        columns["stream_created"],
        strict=True,
    )
    return [Row(seq, subject.split(".", 1)[1], data, created=at) for seq, subject, data, at in rows]


def _through_json(offset: Offset) -> dict[str, Any]:
    return dict(json.loads(json.dumps(offset.to_json())))
