"""The generator: writes to both buckets and the stream, many at once, and keeps the ledger.

Run as ``python -m soak.generator <file>``, a JSON file::

    {"servers": ["nats://…"], "ledger": "…", "seed": 7, "rate": 300}

Ends on SIGTERM: what is under way is awaited first. It talks through nats-py, not through this
package, so that one mistake cannot hide another. The rate has phases: trickle, steady, flood, rest.
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

from buckets import connected
from loops import run

from soak.ledger import DEL, PURGE, PUT, Ledger, Write, value_of
from soak.servers import MARKER_TTL, PREFIXES

WORKERS = 24  # writes under way in each place
KEYS = {"full": 600, "current": 300, "stream": 50}
_ACK_DEADLINE = 5.0
_TICK = 0.02
_PHASES = ((0.03, 8), (1.0, 15), (4.0, 4), (1.0, 10), (0.0, 3))  # share of the rate, seconds
_HEADERS = {DEL: {"KV-Operation": "DEL"}, PURGE: {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}}


class Generator:
    """Writes until it is told to stop."""

    def __init__(self, client: Any, ledger: Ledger, seed: int, rate: float) -> None:
        self._jetstream = client.jetstream()
        self._ledger = ledger
        self._drawn = random.Random(f"{seed} generator")
        self._rate = rate
        self._turns = asyncio.Semaphore(0)
        self._stopped = asyncio.Event()
        self._number = 0

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        """Write; ends after :meth:`stop` when everything under way has come to its end."""
        workers = [
            asyncio.create_task(self._work(place, index))
            for place in KEYS
            for index in range(WORKERS)
        ]
        try:
            await self._pace()
        finally:
            for _ in workers:
                self._turns.release()
            await asyncio.gather(*workers)

    async def _pace(self) -> None:
        due = 0.0
        while True:
            for share, seconds in self._drawn.sample(_PHASES, len(_PHASES)):
                for _ in range(round(seconds / _TICK)):
                    due += share * self._rate * _TICK
                    while due >= 1:
                        due -= 1
                        # Where the servers are away, turns do not pile up for a flood afterwards.
                        if self._turns._value < WORKERS:
                            self._turns.release()
                    try:
                        await asyncio.wait_for(self._stopped.wait(), _TICK)
                        return
                    except asyncio.TimeoutError:
                        pass

    async def _work(self, place: str, index: int) -> None:
        # Each key has one worker, so a key's acknowledged writes have growing numbers.
        keys = range(index, KEYS[place], WORKERS)
        while True:
            await self._turns.acquire()
            if self._stopped.is_set():
                return
            await self._write(self._draw(place, self._drawn.choice(keys)))

    def _draw(self, place: str, key: int) -> Write:
        self._number += 1
        number, drawn = self._number, self._drawn.random()
        if place == "stream":
            return Write(number, place, f"put.{key}")
        kind = ("put", "put", "put", "put", "put", "put", "purge", "ttl")[key % 8]
        name = f"{kind}.{key}"
        if kind == "purge" and drawn < 0.2:
            return Write(number, place, name, PURGE)
        if drawn < 0.25 and kind != "ttl":
            return Write(number, place, name, DEL)
        ttl = MARKER_TTL + number % 10 if kind == "ttl" else 0
        return Write(number, place, name, PUT, ttl)

    async def _write(self, write: Write) -> None:
        self._ledger.send(write)
        headers = dict(_HEADERS.get(write.operation, {}))
        if write.place == "stream" and write.number % 3 == 0:
            headers["Number"] = str(write.number)  # some with a header, some without
        if write.ttl:
            headers["Nats-TTL"] = f"{write.ttl}s"
        payload = value_of(write.number) if write.operation == PUT else b""
        try:
            ack = await self._jetstream.publish(
                PREFIXES[write.place] + write.key,
                payload,
                timeout=_ACK_DEADLINE,
                headers=headers or None,
            )
        except Exception as error:  # no answer, no leader, refused: in every case not acknowledged
            self._ledger.lose(write.number, error)
            await asyncio.sleep(0.2)
        else:
            self._ledger.ack(write.number, ack.seq)


async def main(request: dict[str, Any]) -> None:
    ledger = Ledger(Path(request["ledger"]))

    async def quiet(error: Exception) -> None:
        pass  # a lost connection is what this is here for

    with contextlib.closing(ledger):
        async with connected(
            request["servers"],
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.2,
            connect_timeout=2,
            ping_interval=2,
            max_outstanding_pings=2,
            error_cb=quiet,
        ) as client:
            generator = Generator(client, ledger, request["seed"], request["rate"])
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, generator.stop)
            await generator.run()


if __name__ == "__main__":
    run(main(json.loads(Path(sys.argv[1]).read_text())))
