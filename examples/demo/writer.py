"""A process that writes the flights into the bucket; it takes no time from the query."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import time
from collections import deque
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console

from examples.demo import flights
from examples.demo.query import reached
from nats_stream_source.jetstream import KeyValue, KeyValueConfig, Publisher, connect

BUCKET, HISTORY = "fleet", 64
console = Console(highlight=False, soft_wrap=True, markup=False)


async def create_bucket(url: str) -> None:
    """Create the bucket."""
    async with connect(url) as jetstream:
        await KeyValue.create_bucket(jetstream, KeyValueConfig(BUCKET, history=HISTORY))


class Writer:
    """The process, which ends with this one.

    It counts what it has ``written`` by PubAcks, in ``seconds``; ``puts`` are the revision and the
    time in ns of every tenth write.
    """

    def __init__(self, url: str, replay: flights.Replay) -> None:
        self.written, self.seconds, self.puts = 0, 0.0, list[tuple[int, int]]()
        self._total, self._read, self._shown = replay.writes, 0, time.monotonic()
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        target = partial(_run, pipe, url, replay.departures)
        context.Process(target=target, daemon=True).start()
        pipe.close()

    def go_on(self, limit: int, query: StreamingQuery | None = None, read: int = 0) -> None:
        """Allow ``limit`` writes; wait for them, or until the query has read ``read`` of them."""
        self._pipe.send(limit)
        done = 0
        with console.status("") as status:  # on a terminal
            while done < (limit if query is None else read):
                time.sleep(0.1)
                while self._pipe.poll():
                    self.written, self.seconds, puts = self._pipe.recv()  # EOFError if it failed
                    self.puts += puts
                done = self.written if query is None else reached(query)
                self._read = max(self._read, 0 if query is None else done)
                total = f"of {self._total:,}"
                text = f"written to the bucket {self.written:,} {total}, read into the table"
                text += f" {self._read:,} {total}"
                status.update(text)
                if not console.is_terminal and time.monotonic() - self._shown >= 5:
                    self._shown = time.monotonic()
                    console.print(f"  {text}")


def _run(pipe: Connection, url: str, departures: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends this one
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has ended
        asyncio.run(_write(pipe, url, flights.load(departures)))


async def _write(pipe: Connection, url: str, replay: flights.Replay) -> None:
    pending, puts = deque[asyncio.Future[Any]](), list[tuple[int, int]]()
    operations, sent, seconds, reported = replay.operations(), 0, 0.0, 0.0
    async with connect(url, request_timeout=30) as jetstream:
        publisher = jetstream.connection.service(Publisher)
        while True:
            limit = await asyncio.to_thread(pipe.recv)
            began = time.monotonic() - seconds
            for key, value in islice(operations, limit - sent):
                subject = f"$KV.{BUCKET}.{key}"
                headers = {"KV-Operation": "DEL"} if value is None else None
                pending.append(await publisher.send(subject, value or b"", headers=headers))
                sent += 1
                if sent % 10 == 0:  # in a new bucket the revision is the number of the write
                    puts.append((sent, time.time_ns()))
                while pending and pending[0].done():
                    pending.popleft().result()
                seconds = time.monotonic() - began
                if seconds - reported >= 0.1:
                    pipe.send((sent - len(pending), seconds, puts))
                    reported, puts = seconds, []
            await asyncio.gather(*pending)
            pending.clear()
            seconds = time.monotonic() - began
            pipe.send((sent, seconds, puts))
            puts = []
