"""Writes in a thread that continue under faults of the servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import nats.errors
from nats.js.client import JetStreamContext
from nats.js.errors import Error as JetStreamError

from tests.support.event_loop import run
from tests.support.nats import buckets
from tests.support.oracle.rows import Written, message
from tests.support.query_driver.driver import DEADLINE
from tests.support.writer_thread import WriterThread

if TYPE_CHECKING:
    from tests.support.recorded_stream import RecordedStream

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
        deadline = time.monotonic() + DEADLINE
        while len(self._workload.acknowledged) < target:
            assert self.error is None, self.error
            assert time.monotonic() < deadline, "nothing is acknowledged any more"
            time.sleep(0.01)

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
