"""Replay the flights into the bucket, in a separate process.

The writing process publishes many messages concurrently. It counts a write only when its PubAck is
received, since JetStream drops messages under load without an error for the publisher. The parent
limits the number of writes: it sends limits to the process's standard input, one per line. The end
of this input ends the process, so it does not outlive its parent. The process reports on its
standard output, one JSON object per line: ``{"written": 12000, "seconds": 0.9, "puts": [[11990,
1784563200000000000], …]}``, the latter revision and time in ns of every tenth write.

:class:`Writer` runs in the parent process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import islice

import nats
from nats.aio.client import Client
from nats.js.api import KeyValueConfig

from nats_stream_source.connection.connection import Connection, ConnectionSettings
from nats_stream_source.demo import flights
from nats_stream_source.errors import NatsSourceError
from nats_stream_source.jetstream.publish.publisher import PubAck, Publisher

_IN_FLIGHT = 2000
_ACK_DEADLINE = 30.0
_REPORT_EVERY = 0.1
_PUT_EVERY = 10  # writes


class WriterError(NatsSourceError):
    """The writing process ended before its last write."""


async def connect(url: str) -> Client:
    """A new connection without reconnects: connecting fails at once, and a lost connection ends.

    With its defaults nats-py retries for two minutes, also for the first connection.
    """
    return await nats.connect(
        url, allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0.2
    )


async def create_bucket(url: str, bucket: str, history: int) -> None:
    """Create a bucket that keeps ``history`` revisions per key and allows Direct Get."""
    client = await connect(url)
    config = KeyValueConfig(bucket=bucket, history=history, direct=True)
    await client.jetstream().create_key_value(config=config)
    await client.close()


class _WritingProcess:
    """The writing process: writes up to the current limit, then waits for the next limit."""

    def __init__(self, url: str, bucket: str, departures: int) -> None:
        self._url = url
        self._prefix = f"$KV.{bucket}."
        self._departures = departures
        self._limit = 0
        self._limit_changed = asyncio.Event()
        self._closed = False
        self._written = 0
        self._failed: BaseException | None = None
        self._seconds = 0.0
        self._reported = 0.0
        self._puts: list[tuple[int, int]] = []
        self._pending: set[asyncio.Future[PubAck]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read_input, args=(loop,), daemon=True).start()
        replay = flights.load(self._departures)
        operations = replay.operations()
        # If the connection is lost, the process ends and its parent reports the error.
        settings = ConnectionSettings((self._url,), request_timeout=_ACK_DEADLINE)
        connection = await Connection.open(settings, retry=False)
        try:
            await self._write(Publisher(connection, _IN_FLIGHT), replay.writes, operations)
        finally:
            await connection.close()

    async def _write(
        self, publisher: Publisher, writes: int, operations: Iterator[tuple[str, bytes | None]]
    ) -> None:
        sent = 0
        while sent < writes and not self._closed:
            if sent == self._limit:
                self._limit_changed.clear()
                await self._limit_changed.wait()
                continue
            began = time.monotonic()
            for key, value in islice(operations, self._limit - sent):
                headers = {"KV-Operation": "DEL"} if value is None else None
                acked = await publisher.send(self._prefix + key, value or b"", headers=headers)
                self._pending.add(acked)
                acked.add_done_callback(self._acknowledged)
                sent += 1
                # In a new bucket the revision is the number of the write.
                if sent % _PUT_EVERY == 0:
                    self._puts.append((sent, time.time_ns()))
                if self._failed is not None or self._closed:
                    break
                self._report(self._seconds + time.monotonic() - began)
            await asyncio.gather(*self._pending, return_exceptions=True)
            if self._failed is not None:
                raise self._failed
            self._seconds += time.monotonic() - began
            self._report(self._seconds, now=True)
        await publisher.close()

    def _acknowledged(self, acked: asyncio.Future[PubAck]) -> None:
        self._pending.discard(acked)
        self._failed = self._failed or acked.exception()
        self._written += 1

    def _report(self, seconds: float, now: bool = False) -> None:
        if now or seconds - self._reported >= _REPORT_EVERY:
            self._reported = seconds
            report = {"written": self._written, "seconds": seconds, "puts": self._puts}
            self._puts = []
            print(json.dumps(report), flush=True)

    def _read_input(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(self._allow, int(line))
        loop.call_soon_threadsafe(self._allow, None)

    def _allow(self, upto: int | None) -> None:
        if upto is None:
            self._closed = True
        else:
            self._limit = upto
        self._limit_changed.set()


class Writer:
    """The parent's handle of the writing process; a context manager.

    Args:
        url: the server.
        bucket: an existing bucket.
        departures: number of departures to replay, see :func:`flights.load`.
    """

    def __init__(self, url: str, bucket: str, departures: int) -> None:
        self.written = 0
        """Number of acknowledged writes."""
        self.seconds = 0.0
        """Duration of the writes in seconds, without the time at a limit."""
        self.puts: list[tuple[int, int]] = []
        """Revision and time in ns of every tenth write."""
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (closed by stop)
        command = [sys.executable, "-m", "nats_stream_source.demo.writer", url, bucket]
        # A new session: Ctrl-C reaches only the parent, which then ends the writer.
        self._process = subprocess.Popen(
            [*command, str(departures)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<Writer pid {self._process.pid} written={self.written}>"

    def allow(self, upto: int) -> None:
        """Set the limit to ``upto`` writes in all; does not wait for them."""
        assert self._process.stdin is not None
        try:
            print(upto, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self.verify()

    def verify(self) -> None:
        """Raise if the process has failed.

        Raises:
            WriterError: the process ended with an error; the message has the last line of its
                standard error.
        """
        if self._process.poll():
            self._errors.seek(0)
            last = self._errors.read().strip().rpartition("\n")[2]
            raise WriterError(f"writing process ended after {self.written:,} writes: {last}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            report = json.loads(line)
            self.written, self.seconds = report["written"], report["seconds"]
            self.puts += map(tuple, report["puts"])

    def join(self) -> None:
        """Wait until the process has completed all writes.

        Raises:
            WriterError: the process failed.
        """
        self._process.wait()
        self._reader.join()
        self.verify()

    def stop(self) -> None:
        """End the process at any point."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.terminate()
        self._process.wait()
        self._reader.join()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()


def main() -> None:
    """The writing process: ``python -m nats_stream_source.demo.writer URL BUCKET DEPARTURES``."""
    parser = argparse.ArgumentParser(prog="writer", description=main.__doc__)
    parser.add_argument("url")
    parser.add_argument("bucket")
    parser.add_argument("departures", type=int)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_WritingProcess(given.url, given.bucket, given.departures).run())


if __name__ == "__main__":
    main()
