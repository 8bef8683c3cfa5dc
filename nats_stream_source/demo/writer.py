"""Replays the flights into the bucket, in a process of its own beside Spark.

The writing process publishes with many messages under way, awaits every PubAck and counts a write
only then: without that, JetStream drops what it has no time for and nobody learns of it. It may
write up to the number that its parent last named, one number per line of its standard input; the
end of that input ends the process, so it never outlives its parent. What it has done goes to its
standard output, one JSON object per line: ``{"written": 12000, "seconds": 0.9}``.

:class:`Writer` is the parent's side.
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
from itertools import islice

import nats
from nats.aio.client import Client
from nats.js.api import KeyValueConfig, PubAck

from nats_stream_source.demo import flights
from nats_stream_source.errors import NatsSourceError

_IN_FLIGHT = 2000
_ACK_DEADLINE = 30.0
_REPORT_EVERY = 0.1


class WriterError(NatsSourceError):
    """The writing process ended before it had written what it should."""


async def connect(url: str) -> Client:
    """A connection of its own that fails where it cannot be made, or ends when it is lost.

    By default nats-py goes on trying for two minutes, also to connect for the first time.
    """
    return await nats.connect(
        url, allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0.2
    )


async def create_bucket(url: str, bucket: str, history: int) -> None:
    """A new bucket that keeps ``history`` revisions of a key and may be read by Direct Get."""
    client = await connect(url)
    config = KeyValueConfig(bucket=bucket, history=history, direct=True)
    await client.jetstream().create_key_value(config=config)
    await client.close()


class _Replaying:
    """The writing process: writes ``operations`` up to ``allowed``, waits, goes on."""

    def __init__(self, url: str, bucket: str, departures: int) -> None:
        self._url = url
        self._prefix = f"$KV.{bucket}."
        self._departures = departures
        self._allowed = 0
        self._allowed_more = asyncio.Event()
        self._closed = False
        self._written = 0
        self._failed: BaseException | None = None
        self._seconds = 0.0
        self._reported = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read_input, args=(loop,), daemon=True).start()
        replay = flights.load(self._departures)
        operations = replay.operations()
        # A writer that lost its server has lost its place: it ends, and its parent says so.
        client = await connect(self._url)
        stream = client.jetstream(publish_async_max_pending=_IN_FLIGHT)
        sent = 0
        while sent < replay.writes and not self._closed:
            if sent == self._allowed:
                self._allowed_more.clear()
                await self._allowed_more.wait()
                continue
            began = time.monotonic()
            for key, value in islice(operations, self._allowed - sent):
                acked = await stream.publish_async(
                    self._prefix + key,
                    value or b"",
                    wait_stall=_ACK_DEADLINE,
                    headers={"KV-Operation": "DEL"} if value is None else None,
                )
                acked.add_done_callback(self._acknowledged)
                sent += 1
                if self._failed is not None or self._closed:
                    break
                self._report(self._seconds + time.monotonic() - began)
            await asyncio.wait_for(stream.publish_async_completed(), _ACK_DEADLINE)
            if self._failed is not None:
                raise self._failed
            self._seconds += time.monotonic() - began
            self._report(self._seconds, now=True)
        await client.close()

    def _acknowledged(self, acked: asyncio.Future[PubAck]) -> None:
        self._failed = self._failed or acked.exception()
        self._written += 1

    def _report(self, seconds: float, now: bool = False) -> None:
        if now or seconds - self._reported >= _REPORT_EVERY:
            self._reported = seconds
            print(json.dumps({"written": self._written, "seconds": seconds}), flush=True)

    def _read_input(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(self._allow, int(line))
        loop.call_soon_threadsafe(self._allow, None)

    def _allow(self, upto: int | None) -> None:
        if upto is None:
            self._closed = True
        else:
            self._allowed = upto
        self._allowed_more.set()


class Writer:
    """The parent's handle on the writing process; a context manager.

    Args:
        url: the server.
        bucket: the bucket, which exists.
        departures: how many departures to replay, see :func:`flights.load`.
    """

    def __init__(self, url: str, bucket: str, departures: int) -> None:
        self.written = 0
        """How many writes have been acknowledged."""
        self.seconds = 0.0
        """How long they took, without the time in which the writer was told to wait."""
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (closed by stop)
        command = [sys.executable, "-m", "nats_stream_source.demo.writer", url, bucket]
        # In a session of its own, Ctrl-C reaches the parent only, which ends the writer in order.
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
        """Let it write until ``upto`` writes are done; returns at once."""
        assert self._process.stdin is not None
        try:
            print(upto, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self.check()

    def check(self) -> None:
        """Raise if the process has ended otherwise than by having written everything.

        Raises:
            WriterError: it has; with the last line that it left on its standard error.
        """
        if self._process.poll():
            self._errors.seek(0)
            last = self._errors.read().strip().rpartition("\n")[2]
            raise WriterError(f"the writer ended after {self.written:,} writes: {last}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            report = json.loads(line)
            self.written, self.seconds = report["written"], report["seconds"]

    def join(self) -> None:
        """Wait until the process has written everything and ended.

        Raises:
            WriterError: it ended otherwise.
        """
        self._process.wait()
        self._reader.join()
        self.check()

    def stop(self) -> None:
        """End the process, whatever it has written."""
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
    asyncio.run(_Replaying(given.url, given.bucket, given.departures).run())


if __name__ == "__main__":
    main()
