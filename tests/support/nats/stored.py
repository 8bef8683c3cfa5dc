"""What a stream has stored, read with a pull consumer of nats-py, not with this package."""

from __future__ import annotations

import asyncio

from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig

from tests.support.nats.buckets import with_client
from tests.support.oracle.evidence import DEL, PURGE, PUT, Entry

_BATCH = 1000
_REASONS = {"MaxAge": PURGE, "Purge": PURGE, "Remove": DEL}
"""The operations of the server's own markers, by ``Nats-Marker-Reason``."""


def stored_entries(url: str, stream: str, prefix: str = "") -> list[Entry]:
    """All messages of a stream, in order; their keys are the subjects without ``prefix``."""

    async def read(client: Client) -> list[Entry]:
        jetstream = client.jetstream()
        last = (await jetstream.stream_info(stream)).state.last_seq
        if not last:
            return []
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE,
            num_replicas=1,
            mem_storage=True,
            # On a busy machine two requests may be more than the default of 5 s apart.
            inactive_threshold=600,
        )
        pull = await jetstream.pull_subscribe("", stream=stream, config=config)
        entries: list[Entry] = []
        while not entries or entries[-1].seq < last:
            try:
                messages = await pull.fetch(_BATCH, timeout=5)
            except asyncio.TimeoutError:
                break  # the last messages expired, or were superseded
            for message in messages:
                headers = message.headers or {}
                operation = headers.get("KV-Operation", PUT)
                operation = _REASONS.get(headers.get("Nats-Marker-Reason", ""), operation)
                value = message.data if operation == PUT else None
                seq, at = message.metadata.sequence.stream, message.metadata.timestamp.timestamp()
                key = message.subject.removeprefix(prefix)
                entries.append(Entry(seq, key, operation, value, at=at))
        pending = (await pull.consumer_info()).num_pending
        if pending and (not entries or entries[-1].seq < last):
            raise RuntimeError(f"could not read {pending} messages of {stream}")
        await pull.unsubscribe()
        return entries

    return with_client(url, read)
