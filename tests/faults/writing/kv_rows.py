"""Entries to write to a bucket in the fault tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.kv.batch_writer import KvBatchWriter
from nats_stream_source.jetstream.kv.bucket import Bucket, bucket_stream_info
from nats_stream_source.jetstream.publish.batch_publisher import MessageColumns
from tests.support.nats.buckets import with_client


async def open_bucket(jetstream: JetStream, name: str) -> Bucket:
    info = await bucket_stream_info(jetstream, name)
    return Bucket.from_stream_config(name, info.config)


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
    """Write all batches; returns when they are stored."""
    for batch in batches:
        await writer.send(batch)
    await writer.flush()


def revisions(url: str, bucket: str) -> list[tuple[int, str, bytes]]:
    """Revision, key and value of each stored entry, in order; a marker's value is its operation."""

    async def read(client: Any) -> list[tuple[int, str, bytes]]:
        jetstream = client.jetstream()
        last = (await jetstream.stream_info(f"KV_{bucket}")).state.last_seq
        subscription = await jetstream.subscribe(
            ">", stream=f"KV_{bucket}", ordered_consumer=True, pending_msgs_limit=-1
        )
        found: list[tuple[int, str, bytes]] = []
        while not found or found[-1][0] < last:
            message = await subscription.next_msg(30)
            operation = (message.headers or {}).get("KV-Operation", "")
            key = message.subject.removeprefix(f"$KV.{bucket}.")
            found.append(
                (message.metadata.sequence.stream, key, operation.encode() or message.data)
            )
        await subscription.unsubscribe()
        return found

    return with_client(url, read)
