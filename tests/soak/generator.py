"""The generator: writes to both buckets and the stream concurrently, and records the ledger.

Run as ``python -m tests.soak.generator <file>`` with a JSON file::

    {"servers": ["nats://…"], "directory": "…", "seed": 7, "rate": 300}

It ends on SIGTERM, after the writes in flight. It uses nats-py instead of this package, so that an
error of this package cannot hide another one. The rate has phases: slow, steady, burst, pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

from tests.soak.servers import PREFIXES
from tests.support.event_loop import run
from tests.support.nats import buckets
from tests.support.nats.buckets import connected_under_faults
from tests.support.oracle.evidence import DEL, PURGE, PUT, Ledger, Write, value_of
from tests.support.oracle.expiry import MARKER_TTL

WORKERS = 24  # writes in flight per source
KEYS = {"full": 600, "current": 300, "stream": 50}
_ACK_DEADLINE = 5.0
_TICK = 0.02
_PHASES = ((0.03, 8), (1.0, 15), (4.0, 4), (1.0, 10), (0.0, 3))  # factor of the rate, seconds
_HEADERS = {DEL: buckets.DEL, PURGE: buckets.PURGE}


class Generator:
    def __init__(self, client: Any, ledger: Ledger, seed: int, rate: float) -> None:
        self._jetstream = client.jetstream()
        self._ledger = ledger
        self._chance = random.Random(f"{seed} generator")
        self._rate = rate
        self._permits = asyncio.Semaphore(0)
        self._stopped = asyncio.Event()
        self._number = 0

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        """Write; returns after :meth:`stop` and the end of all writes in flight."""
        workers = [
            asyncio.create_task(self._work(source, index))
            for source in KEYS
            for index in range(WORKERS)
        ]
        try:
            await self._pace()
        finally:
            for _ in workers:
                self._permits.release()
            await asyncio.gather(*workers)

    async def _pace(self) -> None:
        due = 0.0
        while True:
            for share, seconds in self._chance.sample(_PHASES, len(_PHASES)):
                for _ in range(round(seconds / _TICK)):
                    due += share * self._rate * _TICK
                    while due >= 1:
                        due -= 1
                        # While servers are unavailable, permits do not accumulate for a later
                        # burst.
                        if self._permits._value < WORKERS:
                            self._permits.release()
                    try:
                        await asyncio.wait_for(self._stopped.wait(), _TICK)
                        return
                    except asyncio.TimeoutError:
                        pass

    async def _work(self, source: str, index: int) -> None:
        # Each key has one worker, so the numbers of a key's acknowledged writes increase.
        keys = range(index, KEYS[source], WORKERS)
        while True:
            await self._permits.acquire()
            if self._stopped.is_set():
                return
            await self._write(self._next_write(source, self._chance.choice(keys)))

    def _next_write(self, source: str, key: int) -> Write:
        self._number += 1
        number, chance = self._number, self._chance.random()
        if source == "stream":
            return Write(number, source, f"put.{key}")
        kind = ("put", "put", "put", "put", "put", "put", "purge", "ttl")[key % 8]
        name = f"{kind}.{key}"
        if kind == "purge" and chance < 0.2:
            return Write(number, source, name, PURGE)
        if chance < 0.25 and kind != "ttl":
            return Write(number, source, name, DEL)
        ttl = MARKER_TTL + number % 10 if kind == "ttl" else 0
        return Write(number, source, name, PUT, ttl)

    async def _write(self, write: Write) -> None:
        self._ledger.sent(write)
        headers = dict(_HEADERS.get(write.operation, {}))
        if write.source == "stream" and write.number % 3 == 0:
            headers["Number"] = str(write.number)  # a third of the messages have a header
        if write.ttl:
            headers["Nats-TTL"] = f"{write.ttl}s"
        payload = value_of(write.number) if write.operation == PUT else b""
        try:
            ack = await self._jetstream.publish(
                PREFIXES[write.source] + write.key,
                payload,
                timeout=_ACK_DEADLINE,
                headers=headers or None,
            )
        except Exception as error:  # timeout, no leader, rejected: not acknowledged
            self._ledger.unsure(write.number, error)
            await asyncio.sleep(0.2)
        else:
            self._ledger.acked(write.number, ack.seq)


async def main(request: dict[str, Any]) -> None:
    ledger = Ledger(Path(request["directory"], "ledger.tsv"))
    with contextlib.closing(ledger):
        async with connected_under_faults(request["servers"]) as client:
            generator = Generator(client, ledger, request["seed"], request["rate"])
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, generator.stop)
            await generator.run()


if __name__ == "__main__":
    run(main(json.loads(Path(sys.argv[1]).read_text())))
