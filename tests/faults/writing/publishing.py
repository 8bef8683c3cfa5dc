"""Messages and entries to publish in the fault tests, and what must be stored afterwards."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import nats.errors
import pyarrow as pa
import pytest
from nats.js.errors import ServiceUnavailableError

from nats_stream_source.jetstream import connect
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.batch_writer import KvBatchWriter
from nats_stream_source.jetstream.kv.bucket import Bucket, bucket_stream_info
from nats_stream_source.jetstream.publish import MAX_IN_FLIGHT
from nats_stream_source.jetstream.publish.batch_publisher import (
    BatchPublisher,
    FastIngestPublisher,
    MessageColumns,
)
from nats_stream_source.jetstream.publish.column_publisher import ColumnPublisher
from tests.support.nats.stored import stored_entries
from tests.support.nats.streams import create_stream
from tests.support.oracle.evidence import Entry
from tests.support.proxy.fault_proxy import Outcome, Proxy, subject_of
from tests.support.proxy.verdicts import Counted, FrameFault
from tests.support.wait import wait_until

SUBJECTS = 7
"""Number of subjects that messages are spread over."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages ``first``, ``first + 1``, … of a stream; the payload is the number.

    Attributes:
        stream: the name; the subjects are ``<stream>.0`` to ``<stream>.6``.
        ids: whether each message has a ``Nats-Msg-Id``.
        size: of each payload, at least.
    """

    stream: str
    count: int
    first: int = 0
    ids: bool = False
    size: int = 0

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)

    def subject(self, number: int) -> str:
        return f"{self.stream}.{number % SUBJECTS}"

    def columns(self) -> MessageColumns:
        headers = None
        if self.ids:
            blocks = [b"NATS/1.0\r\nNats-Msg-Id: m%d\r\n\r\n" % number for number in self.numbers]
            headers = pa.array(blocks, pa.binary())
        return MessageColumns(
            pa.array([self.subject(number) for number in self.numbers]),
            pa.array([(b"%d" % number).ljust(self.size) for number in self.numbers], pa.binary()),
            headers,
        )

    def check(self, url: str, *, first_seq: int = 1, in_order: bool = True) -> list[int]:
        """Check that all messages are stored; with ids, each once.

        If ``in_order``, the last one of each subject is the last sent; with ids, the messages of a
        subject have their order.

        Returns:
            the numbers of the stored messages, in the order of the stream.
        """
        found = stored(url, self.stream, first_seq)
        assert {number for _, number in found} == set(self.numbers)
        numbers = [number for _, number in found]
        assert not self.ids or len(numbers) == self.count
        for subject in {self.subject(number) for number in self.numbers if in_order}:
            expected = [number for number in self.numbers if self.subject(number) == subject]
            actual = [number for name, number in found if name == subject]
            assert actual[-1] == expected[-1], f"the last message on {subject}"
            if self.ids:
                assert actual == expected
        return numbers


def stored(url: str, stream: str, first_seq: int = 1) -> list[tuple[str, int]]:
    """Subject and number of each message of a stream, in order."""
    complete: list[list[Entry]] = []

    def told() -> bool:
        # A cluster lacks a meta leader for a while after a server was stopped.
        with contextlib.suppress(ServiceUnavailableError, nats.errors.TimeoutError):
            complete.append(stored_entries(url, stream))
        return bool(complete)

    wait_until(told, f"the messages of {stream}")
    return [(one.key, int(one.value or b"")) for one in complete[0] if one.seq >= first_seq]


@contextlib.asynccontextmanager
async def publishing(
    servers: str | Sequence[str],
    stream: str,
    *,
    kind: type[BatchPublisher | FastIngestPublisher] = BatchPublisher,
    max_in_flight: int = MAX_IN_FLIGHT,
    retry_timeout: float = 30,
    **settings: Any,
) -> AsyncIterator[ColumnPublisher]:
    """A publisher on a connection of its own, which waits up to 30 seconds for a server."""
    async with (
        connect(servers, **settings) as jetstream,
        kind(
            jetstream, stream, max_in_flight=max_in_flight, retry_timeout=retry_timeout
        ) as publisher,
    ):
        yield publisher


async def publish(publisher: ColumnPublisher, messages: Messages) -> None:
    await publisher.send(messages.columns())
    await publisher.flush()


async def publish_all(
    servers: str | Sequence[str], messages: Messages, **settings: Any
) -> ColumnPublisher:
    """Publish the messages on a connection of their own: each is stored."""
    async with publishing(servers, messages.stream, **settings) as publisher:
        await publish(publisher, messages)
        assert publisher.stored == messages.count
    return publisher


# -- frames on their way through the proxy --------------------------------------------------------


def is_pub_ack(frame: bytes) -> bool:
    """Whether a frame of the server is a PubAck, or a rejection of a message."""
    _, _, payload = frame.partition(b"\r\n")
    return payload.startswith((b'{"stream":', b'{"error":'))


def number_of(frame: bytes) -> int | None:
    """The number of a message that the client publishes; None for another frame."""
    if not frame.startswith((b"PUB ", b"HPUB ")):
        return None
    line, _, rest = frame.partition(b"\r\n")
    if b"$JS." in line or line.endswith((b".3.$FI 0", b".4.$FI 0")):  # not a message
        return None
    header = int(line.split(b" ")[-2]) if frame.startswith(b"H") else 0
    return int(rest[header:])


def sendings(proxy: Proxy) -> Counter[int]:
    return Counter(n for frame in proxy.sent if (n := number_of(frame)) is not None)


PubAcks = partial(Counted, is_pub_ack)
"""The PubAcks with these numbers, counted from 1 over all connections."""


def _at(matches: Callable[[bytes], bool], number: int, act: Callable[[], object]) -> Counted:
    def lost(frame: bytes) -> Outcome:
        act()
        return False

    return Counted(matches, (number,), lost)


AtPubAck = partial(_at, is_pub_ack)
"""Call ``act`` when the PubAck with this number comes; the PubAck is lost."""


class Sending(FrameFault):
    """Messages with these numbers when they are sent for the n-th time, counted from 1."""

    def __init__(self, time: int, numbers: Container[int], outcome: Outcome = False) -> None:
        super().__init__(outcome)
        self._time = time
        self._numbers = numbers
        self._sent: Counter[int] = Counter()

    def hits(self, frame: bytes) -> bool:
        number = number_of(frame)
        if number is None:
            return False
        self._sent[number] += 1
        return self._sent[number] == self._time and number in self._numbers


# -- fast ingest ----------------------------------------------------------------------------------

FLOW = 500
"""Messages that a server acknowledges together at most."""


def is_response(frame: bytes) -> bool:
    """Whether a frame of the server is a response to a message of a batch."""
    return frame.startswith((b"MSG ", b"HMSG ")) and subject_of(frame).endswith(".$FI")


def responses(proxy: Proxy, kind: str) -> list[dict[str, Any]]:
    """The responses of a kind that passed: ``ack``, ``gap``, ``err``, ``count``, ``error``."""
    found = [json.loads(one.partition(b"\r\n")[2]) for one in proxy.seen if is_response(one)]
    return [
        one for one in found if one.get("type", kind) == kind and (kind in one or "type" in one)
    ]


Responses, AtResponse = partial(Counted, is_response), partial(_at, is_response)
"""As ``PubAcks`` and ``AtPubAck``, for the responses of fast ingest."""


# -- both publishers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PublisherKind:
    """A publisher and the faults of its acknowledgements.

    Attributes:
        acks: drops acknowledgements by their numbers.
        at_ack: acts when the acknowledgement with a number arrives.
        middle: the number of an acknowledgement that arrives while 2,000 messages are sent.
    """

    name: str
    publisher: type[BatchPublisher | FastIngestPublisher]
    acks: Callable[..., Counted]
    at_ack: Callable[..., Counted]
    middle: int
    max_in_flight: int

    def create_stream(self, url: str, name: str, **config: Any) -> None:
        """Create a stream with the subjects ``<name>.>`` that accepts both publishers."""
        create_stream(url, name, allow_batched=self.publisher is FastIngestPublisher, **config)

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": self.publisher, "max_in_flight": self.max_in_flight}

    async def publish_all(self, servers: str, messages: Messages, **settings: Any) -> None:
        """Publish the messages on a connection of their own: each is stored."""
        await publish_all(servers, messages, **self.settings, **settings)


BATCH = PublisherKind("BATCH", BatchPublisher, PubAcks, AtPubAck, middle=500, max_in_flight=500)
FAST_INGEST = PublisherKind(
    "FAST", FastIngestPublisher, Responses, AtResponse, middle=4, max_in_flight=MAX_IN_FLIGHT
)

each_publisher = pytest.mark.parametrize("kind", [BATCH, FAST_INGEST], ids=["batch", "fast ingest"])
with_and_without_ids = pytest.mark.parametrize(
    "ids", [False, True], ids=["without ids", "with ids"]
)


# -- entries of a bucket ---------------------------------------------------------------------------


async def open_bucket(jetstream: JetStream, name: str) -> Bucket:
    return Bucket.of(await bucket_stream_info(jetstream, name))


def puts(
    bucket: str, numbers: Iterable[int], *, expected: int | None = None, job: str = "job"
) -> MessageColumns:
    """Entries of the keys ``k<number>``, whose values are the numbers.

    Args:
        expected: the expected revision of each; None writes in any case.
        job: the first part of the message ids, which conditional entries have.
    """
    chosen = list(numbers)
    headers = None
    if expected is not None:
        blocks = [
            f"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: {expected}\r\n"
            f"Nats-Msg-Id: {job}.{number}\r\n\r\n".encode()
            for number in chosen
        ]
        headers = pa.array(blocks, pa.binary())
    return MessageColumns(
        pa.array([f"$KV.{bucket}.k{number}" for number in chosen]),
        pa.array([b"%d" % number for number in chosen], pa.binary()),
        headers,
    )


async def write(writer: KvBatchWriter, *batches: MessageColumns) -> None:
    for batch in batches:
        await writer.send(batch)
    await writer.flush()


def revisions(url: str, bucket: str) -> list[tuple[int, str, bytes]]:
    """Revision, key and value of each stored entry, in order; a marker's value is its operation."""
    entries = stored_entries(url, f"KV_{bucket}", f"$KV.{bucket}.")
    return [(one.seq, one.key, one.value or one.operation.encode()) for one in entries]
