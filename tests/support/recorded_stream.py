"""A bucket or stream with a record of its writes, and the comparison of a query's rows with it.

Each write of a :class:`RecordedStream` is unique and numbered, and its PubAck is awaited.
:meth:`RecordedStream.query` returns a :class:`QueryDriver`; a second query with the offsets of the
first one is a restart. :meth:`RecordedStream.check` asserts with the oracle that each acknowledged
write was read, once and in order, and that each row was written.

Three kinds: ``kv`` reads all revisions of a bucket; ``kv current`` reads the last revision of each
key (an ordered consumer with ``last_per_subject``, if the bucket keeps more than one revision);
``stream`` reads the messages of a stream. Each key is written once, so all revisions are the last
ones. With ``hot`` a few keys are written repeatedly, and some are removed
(:meth:`RecordedStream.check_queries`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import nats.errors
import pytest
from nats.js.client import JetStreamContext
from nats.js.errors import Error as JetStreamError

from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream import reusable_connection
from nats_stream_source.jetstream.ordered import consumer
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.options import kv_options, stream_options
from nats_stream_source.rows import base
from tests.support.event_loop import run
from tests.support.nats import buckets
from tests.support.nats.streams import create_stream
from tests.support.oracle.row_check import (
    Marker,
    Row,
    Written,
    check_all_read,
    check_batches,
    check_rows,
    message,
)
from tests.support.query_driver.driver import DEADLINE, OffsetJson, QueryDriver
from tests.support.wait import WriterThread, wait_until

KINDS = ("kv", "kv current", "stream")
SEQUENCE_TERMS = {"kv": "revision", "kv current": "revision", "stream": "sequence"}
"""The word for a sequence in the errors of each kind."""
KINDS_IN_TURN = (
    "kv",
    pytest.param("kv current", marks=pytest.mark.faults),
    pytest.param("stream", marks=pytest.mark.faults),
)
"""For tests that take seconds: one kind with the fast ones, all with ``make test-faults``."""


def crash(server: NatsServer) -> None:
    server.kill()
    server.start()


AGAIN: dict[str, Callable[[NatsServer], None]] = {"restarted": NatsServer.restart, "killed": crash}
"""How a server restarts."""

_serial = itertools.count(1)
_DELETED, _PURGED = 0.05, 0.02  # shares of the writes of a hot recorded stream


def use_long_deadlines(monkeypatch: pytest.MonkeyPatch, heartbeat: float = 5.0) -> None:
    """Let readers wait for three long heartbeats, and for any PONG, before they rebuild.

    For tests that count consumers or connections: on a busy machine a server may pause for so long
    that readers otherwise rebuild.
    """
    monkeypatch.setattr(base, "RangeRequest", partial(RangeRequest, heartbeat=heartbeat))
    monkeypatch.setattr(reusable_connection, "_PING_DEADLINE", DEADLINE)
    monkeypatch.setattr(consumer, "_PONG_TIMEOUT", DEADLINE)


_IN_FLIGHT = 100
_NOT_ACKNOWLEDGED = (nats.errors.Error, JetStreamError, OSError, asyncio.TimeoutError)


class Writing(WriterThread):
    """Writes until it is stopped; a write that is not acknowledged is not repeated."""

    def __init__(self, recorded: RecordedStream, urls: Sequence[str], size: int) -> None:
        super().__init__(DEADLINE)
        self._workload = recorded
        self._urls = list(urls)
        self._size = size
        self.failed = 0

    def write_until_stopped(self) -> None:
        run(self._write())

    def wait(self, count: int) -> None:
        """Wait until ``count`` more writes are acknowledged."""
        target = len(self._workload.acknowledged) + count
        wait_until(
            lambda: self.error or len(self._workload.acknowledged) >= target,
            f"{count} more writes are acknowledged",
            DEADLINE,
        )
        assert self.error is None, self.error

    async def _write(self) -> None:
        async with buckets.connected_under_faults(self._urls) as client:
            await self._write_with(client.jetstream())

    async def _write_with(self, jetstream: JetStreamContext) -> None:
        recorded = self._workload

        async def put(written: Written) -> None:
            subject, payload, headers = message(recorded.prefix, written)
            try:
                ack = await jetstream.publish(subject, payload, timeout=3, headers=headers)
            except _NOT_ACKNOWLEDGED:
                self.failed += 1
            else:
                recorded.acknowledged[ack.seq] = written

        while not self.over.is_set():
            await asyncio.gather(*(put(one) for one in recorded.next(_IN_FLIGHT, self._size)))
            await asyncio.sleep(0.01)


class RecordedStream:
    """One bucket or stream, and the record of its writes.

    Args:
        kind: one of :data:`KINDS`.
        url: the server that is written to.
        hot: the number of keys that are written repeatedly, some much more often than others; in a
            bucket some are deleted or purged. 0: each key is written once.

    Attributes:
        acknowledged: by stream sequence, the key and the value, or the marker.
        attempted: each key and value or marker, also those without a PubAck.
        history: how many revisions of a key the bucket keeps; -1 for any number.
    """

    def __init__(self, kind: str, url: str, *, hot: int = 0) -> None:
        self.kind = kind
        self.url = url
        self.hot = hot
        self.name = f"t{next(_serial)}"
        self.stream = f"KV_{self.name}" if self.is_kv else self.name
        self.acknowledged: dict[int, Written] = {}
        self.attempted: Counter[Written] = Counter()
        self.history = -1
        self._numbers = itertools.count()
        self._random = random.Random(hot)

    @property
    def is_kv(self) -> bool:
        return self.kind != "stream"

    @property
    def prefix(self) -> str:
        return f"$KV.{self.name}." if self.is_kv else f"{self.name}."

    @property
    def last(self) -> int:
        return max(self.acknowledged, default=0)

    def last_values(self) -> list[int]:
        """The sequences of each key's last write that was acknowledged."""
        return sorted({key: seq for seq, (key, _) in sorted(self.acknowledged.items())}.values())

    def create(self, **config: Any) -> RecordedStream:
        if self.is_kv:
            config.setdefault("max_msgs_per_subject", config.pop("history", 64))
            self.history = config["max_msgs_per_subject"]
            buckets.create_bucket(self.url, self.name, **config)
        else:
            create_stream(self.url, self.name, **{"allow_direct": True, **config})
        return self

    def state(self, url: str | None = None) -> dict[str, Any]:
        """The stream's state at its leader."""
        info = buckets.api(url or self.url, f"STREAM.INFO.{self.stream}")
        return dict(info["state"])

    def consumers(self, url: str | None = None) -> list[str]:
        return buckets.consumers_of(url or self.url, self.stream)

    def delete_consumers(self) -> list[str]:
        """Delete all consumers; return their names."""
        names = self.consumers()
        for name in names:
            buckets.api(self.url, f"CONSUMER.DELETE.{self.stream}.{name}")
        return names

    # -- writing ----------------------------------------------------------------------------------

    def messages(self, count: int, size: int = 0) -> list[tuple[str, bytes]]:
        """The next ``count`` keys and values, of ``size`` bytes or a little more."""
        found = []
        for number in itertools.islice(self._numbers, count):
            value = b"%d." % number + b"x" * size
            found.append((self._key(number), value))
        self.attempted.update(found)
        return found

    def _key(self, number: int) -> str:
        # By turns, the last values would be the last messages.
        return f"k{int(self.hot * self._random.random() ** 3) if self.hot else number}"

    def next(self, count: int, size: int = 0) -> list[Written]:
        """The next writes, with markers among them where the recorded stream is hot."""
        found: list[Written] = [*self.messages(count, size)]
        for i, written in enumerate(found if self.hot and self.is_kv else []):
            drawn = self._random.random()
            if drawn < _DELETED + _PURGED:
                del self.attempted[written]
                found[i] = written[0], Marker.DEL if drawn < _DELETED else Marker.PURGE
                self.attempted[found[i]] += 1
        return found

    def write(self, count: int, size: int = 0, url: str | None = None) -> None:
        """Write ``count`` times; each must be acknowledged."""
        self.put(self.next(count, size), url)

    def put(
        self,
        written: Sequence[Written],
        url: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> list[int]:
        """Write and await each PubAck; return the sequences. Values have ``headers``."""
        made = [message(self.prefix, one) for one in written]
        messages = [(subject, value, own or headers) for subject, value, own in made]
        sequences = buckets.publish(url or self.url, messages)
        self.acknowledged.update(zip(sequences, written, strict=True))
        return sequences

    def remove_after(self, after: int) -> None:
        """Remove the acknowledged writes after a sequence, which a rollback of the server lost."""
        for seq in [seq for seq in self.acknowledged if seq > after]:
            del self.acknowledged[seq]

    def writing(self, urls: Sequence[str], size: int = 100) -> Writing:
        """Write in the background during the block; unacknowledged writes are not repeated."""
        return Writing(self, urls, size)

    # -- reading ----------------------------------------------------------------------------------

    def options(self, url: str, **more: str) -> dict[str, str]:
        own = {"bucket": self.name} if self.is_kv else {"stream": self.name}
        if self.kind == "kv":
            own["includeHistory"] = "true"
        return {"servers": url, **own, **more}

    def query(
        self,
        url: str | None = None,
        offsets: Iterable[OffsetJson] = (),
        *,
        outage_timeout: float = 0.0,
        **options: str,
    ) -> QueryDriver:
        """Return a query of this stream, which continues after the last of ``offsets``."""
        given = self.options(url or self.url, **options)
        parsed = kv_options(given) if self.is_kv else stream_options(given)
        if not self.hot:
            return QueryDriver(parsed, offsets, outage_timeout=outage_timeout)
        return QueryDriver(parsed, offsets, last_now=lambda: int(self.state()["last_seq"]))

    # -- the oracle -------------------------------------------------------------------------------

    def check(
        self, rows: Sequence[Row], *, lost: Iterable[int] = (), after: int = 0, through: int = -1
    ) -> None:
        """Compare ``rows`` with what was written in ``(after, through]``.

        Args:
            lost: sequences that the server lost or the test removed.
            through: the last acknowledged one when -1.
        """
        through = self.last if through < 0 else through
        acknowledged, attempted = self.acknowledged, self.attempted
        check_all_read(rows, acknowledged, attempted, after=after, through=through, lost=lost)

    def check_queries(self, *queries: QueryDriver) -> None:
        """Compare all rows of a query and its restarts with repeated writes of the same keys.

        A micro-batch of last values has the last revision of each key; a later one has all
        revisions that the bucket still had.

        Args:
            queries: from the start on; each continues with the offsets of the previous one.
        """
        rows = [row for query in queries for row in query.rows]
        done = [batch for query in queries for batch in query.done]
        check_rows(rows, self.acknowledged, self.attempted)
        check_batches(rows, self.acknowledged, self.attempted, self.history, done)


def purge(recorded: RecordedStream, keep: int) -> None:
    """All but the last ``keep`` messages."""
    buckets.api(recorded.url, f"STREAM.PURGE.{recorded.stream}", {"keep": keep} if keep else {})
    assert recorded.state()["messages"] == keep


def limit(recorded: RecordedStream, keep: int) -> None:
    """The same by a limit that the stream gets now, and keeps."""
    _update(recorded, max_msgs=keep, discard="old")
    wait_until(lambda: recorded.state()["messages"] == keep, "only so many are left")


def expire(recorded: RecordedStream) -> None:
    """Let all that there is grow too old, and what comes then stay."""
    _update(recorded, max_age=200_000_000)
    wait_until(lambda: recorded.state()["messages"] == 0, "all has expired", deadline=120)
    _update(recorded, max_age=0)


def _update(recorded: RecordedStream, **changed: Any) -> None:
    config = buckets.api(recorded.url, f"STREAM.INFO.{recorded.stream}")["config"]
    buckets.api(recorded.url, f"STREAM.UPDATE.{recorded.stream}", {**config, **changed})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The texts of all log lines at level WARNING and above."""
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def loss_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of lost messages."""
    return [text for text in warnings(caplog) if "aged out" in text]
