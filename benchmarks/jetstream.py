"""The JetStream client compared with a bare socket and with nats-py, for the same operations.

``python -m benchmarks.jetstream [--quick] [--json FILE]``

===============  ====================  =================================  =======================
what             bare socket           this package                       nats-py
===============  ====================  =================================  =======================
Direct Get       batches, counted      ``DirectGet.batch`` (messages),    ``get_msg(direct=True)``,
                                       ``.pages`` (frames)                many in flight
watch            push consumer,        ``KeyValue.watch``, all history,   ``watchall``, all history
                 counted               to the end of the initial data
ordered          the same              ``subscribe_ordered``,            ``subscribe`` with
                                       ``OrderedReader`` (frames)         ``ordered_consumer``
put              many in flight,       ``Publisher.send``, all PubAcks    ``publish_async``, all
                 PubAcks counted       awaited                            PubAcks awaited
===============  ====================  =================================  =======================

The three clients alternate on one server; rates are medians in messages per second. nats-py reads
fewer messages in operations that would take minutes. This does not reduce its rate, which does not
grow with the number of messages.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client
from rich.console import Console

from benchmarks.support.bucket_data import SIZE, entries, fill_bucket
from benchmarks.support.machine import OtherProcesses, machine
from benchmarks.support.output import finish
from benchmarks.support.raw_connection import RawConnection, drain, fill
from nats_stream_source.connection.connection import Connection
from nats_stream_source.embedded import NatsServer
from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.direct_get.client import DirectGet
from nats_stream_source.jetstream.kv.store import KeyValue
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.publish.publisher import Publisher
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.subscriptions.subscribe import subscribe_ordered

BARE = "bare socket"
NATS_PY = "nats-py"
_PAGE = 8192  # messages of one Direct Get
_IN_FLIGHT = 4000
_TAIL = 256  # bytes; an EOB is shorter
_ALL = "$KV.bench.>"

Way = Callable[[], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Result:
    """The rate of one client for one operation; ``lost`` messages are those of all rounds."""

    what: str
    way: str
    messages: int
    rate: float
    lost: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All results, and the load of other processes."""

    results: list[Result]
    others: dict[str, float]

    def ratio(self, one: Result, over: str) -> float:
        """The rate of ``one`` divided by that of the client ``over`` for the same operation."""
        (other,) = (o for o in self.results if o.what == one.what and o.way == over)
        return one.rate / other.rate

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "others": self.others,
            "results": [
                one.as_dict()
                | {"over_bare": self.ratio(one, BARE), "over_nats_py": self.ratio(one, NATS_PY)}
                for one in self.results
            ],
        }


async def measure(rows: int, rounds: int) -> Outcome:
    """Fill two buckets, a small one for slow clients, and alternate all clients."""
    few = max(rows // 10, 1)
    with NatsServer() as server, OtherProcesses() as others:
        fill_bucket(server.port, "bench", entries(rows, max(rows // 10, 1)), history=64)
        fill_bucket(server.port, "few", entries(few, max(few // 10, 1)), history=64)
        expected = await asyncio.to_thread(drain, server.port, "KV_bench", rows)
        async with connect(server.url) as jetstream, await nats.connect(server.url) as client:
            results: list[Result] = []
            for what, ways in _ways(server.port, rows, few, expected, jetstream, client).items():
                results += await _alternate(what, ways, rounds)
    return Outcome(results, others.as_dict())


async def _alternate(what: str, ways: dict[str, tuple[int, Way]], rounds: int) -> list[Result]:
    rates: dict[str, list[float]] = {}
    lost = dict.fromkeys(ways, 0)
    for _ in range(rounds):
        for way, (messages, run) in ways.items():
            began = time.perf_counter()
            count = await run()
            rates.setdefault(way, []).append(count / (time.perf_counter() - began))
            lost[way] += messages - count
            if count != messages and way != NATS_PY:
                raise RuntimeError(f"{what}, {way}: {count:,} of {messages:,} messages")
    return [
        Result(what, way, messages, statistics.median(rates[way]), lost[way])
        for way, (messages, _) in ways.items()
    ]


def _ways(
    port: int, rows: int, few: int, expected: int, jetstream: JetStream, client: Client
) -> dict[str, dict[str, tuple[int, Way]]]:
    async def bare_push() -> int:
        await asyncio.to_thread(drain, port, "KV_bench", rows, expected)
        return rows

    return {
        "Direct Get": {
            BARE: (rows, lambda: asyncio.to_thread(_bare_direct, port, rows)),
            "messages": (rows, lambda: _direct_messages(jetstream)),
            "frames": (rows, lambda: _direct_frames(jetstream)),
            NATS_PY: (few, lambda: _nats_py_direct(client, few)),
        },
        "watch": {
            BARE: (rows, bare_push),
            "entries": (rows, lambda: _watch(jetstream)),
            NATS_PY: (few, lambda: _nats_py_watch(client)),
        },
        "ordered": {
            BARE: (rows, bare_push),
            "messages": (rows, lambda: _ordered(jetstream, rows)),
            "frames": (rows, lambda: _ordered_frames(jetstream, rows)),
            NATS_PY: (few, lambda: _nats_py_ordered(client, few)),
        },
        "put": {
            BARE: (few, lambda: asyncio.to_thread(_bare_put, port, few)),
            "Publisher": (few, lambda: _put(jetstream.connection, few)),
            NATS_PY: (few, lambda: _nats_py_put(client, few)),
        },
    }


# -- Direct Get ------------------------------------------------------------------------------------


def _bare_direct(port: int, rows: int) -> int:
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    with RawConnection(port) as connection:
        connection.send(b"SUB _D 1\r\n")
        for first in range(1, rows + 1, _PAGE):
            body = b'{"seq":%d,"batch":%d,"next_by_subj":"$KV.bench.>"}' % (first, _PAGE)
            connection.send(b"PUB $JS.API.DIRECT.GET.KV_bench _D %d\r\n%s\r\n" % (len(body), body))
            # The status line of the EOB is in the last bytes received.
            tail = b""
            while b"NATS/1.0 204 EOB" not in tail:
                count = connection.socket.recv_into(buffer)
                if not count:
                    raise ConnectionError("the server closed the connection")
                tail = (tail + bytes(view[max(count - _TAIL, 0) : count]))[-_TAIL:]
    return rows


async def _direct_messages(jetstream: JetStream) -> int:
    count = 0
    async with contextlib.aclosing(DirectGet(jetstream, "KV_bench").batch(_ALL)) as messages:
        async for _ in messages:
            count += 1
    return count


async def _direct_frames(jetstream: JetStream) -> int:
    count = 0
    async with contextlib.aclosing(DirectGet(jetstream, "KV_bench").pages(_ALL)) as pages:
        async for page in pages:
            count += len(page)
    return count


async def _nats_py_direct(client: Client, few: int) -> int:
    api = client.jsm()
    count = 0
    for first in range(1, few + 1, 250):
        wanted = range(first, min(first + 250, few + 1))
        found = await asyncio.gather(*(api.get_msg("KV_few", seq, direct=True) for seq in wanted))
        count += sum(message.seq is not None for message in found)
    return count


# -- watch -----------------------------------------------------------------------------------------


async def _watch(jetstream: JetStream) -> int:
    bucket = await KeyValue.open(jetstream, "bench")
    count = 0
    async with bucket.watch_all(include_history=True) as watch:
        async for entry in watch:
            if entry is None:
                break
            count += 1
    return count


async def _nats_py_watch(client: Client) -> int:
    bucket = await client.jetstream().key_value("few")
    watcher = await bucket.watchall(include_history=True)
    count = 0
    try:
        while True:
            try:
                entry = await watcher.updates(timeout=2)
            except nats.errors.TimeoutError:
                break  # nats-py lost messages and waits for them
            if entry is None:
                break
            count += 1
    finally:
        await watcher.stop()
    return count


# -- ordered consumer ------------------------------------------------------------------------------


async def _ordered(jetstream: JetStream, rows: int) -> int:
    count = 0
    async with await subscribe_ordered(jetstream, _ALL, stream="KV_bench") as messages:
        async for _ in messages:
            count += 1
            if count == rows:
                break
    return count


async def _ordered_frames(jetstream: JetStream, rows: int) -> int:
    created = (await jetstream.stream_info("KV_bench")).created
    request = RangeRequest(stream="KV_bench", created=created, start=0, end=rows)
    reader = OrderedReader(SharedConnection(jetstream.connection), request)
    count = 0
    async for frames in reader.batches():
        count += len(frames)
    return count


async def _nats_py_ordered(client: Client, few: int) -> int:
    subscription = await client.jetstream().subscribe(
        "$KV.few.>", stream="KV_few", ordered_consumer=True
    )
    count = 0
    try:
        while count < few:
            try:
                await subscription.next_msg(timeout=2)
            except nats.errors.TimeoutError:
                break
            count += 1
    finally:
        await subscription.unsubscribe()
    return count


# -- put -------------------------------------------------------------------------------------------


def _values(few: int) -> list[tuple[str, bytes]]:
    return [(f"$KV.few.put.{i % 1000}", bytes(SIZE)) for i in range(few)]


def _bare_put(port: int, few: int) -> int:
    return fill(port, ((subject, b"", value) for subject, value in _values(few)))


async def _put(connection: Connection, few: int) -> int:
    publisher = Publisher(connection, in_flight=_IN_FLIGHT)
    try:
        futures = [await publisher.send(subject, value) for subject, value in _values(few)]
        return len(await asyncio.gather(*futures))
    finally:
        await publisher.close()


async def _nats_py_put(client: Client, few: int) -> int:
    # One context for all messages, since it keeps the futures of those in flight.
    jetstream = client.jetstream()
    count = 0
    values = _values(few)
    for first in range(0, few, _IN_FLIGHT):
        futures = [
            await jetstream.publish_async(subject, value)
            for subject, value in values[first : first + _IN_FLIGHT]
        ]
        count += len(await asyncio.gather(*futures))
    return count


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="fewer messages, one round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    host = machine()
    console.print(str(host))
    rows, rounds = (50_000, 1) if options.quick else (options.rows, options.rounds)
    outcome = asyncio.run(measure(rows, rounds))
    finish("jetstream", host, {"jetstream": outcome.as_dict()}, options.json)


if __name__ == "__main__":
    main()
