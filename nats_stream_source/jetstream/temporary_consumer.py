"""A consumer that exists for a few requests, as a context manager.

The response to the creation of a consumer has facts that no other request returns: how many
messages match from a sequence on, where a deliver policy starts, and which server serves it. The
consumer is deleted at the end of the block: after an error and a cancellation too, and after a
creation without a response. If the deletion fails, the server removes the consumer after its
``inactive_threshold``.

The consumers of an ordered reader live longer than a block: ``ordered/consumer.py`` deletes them,
on the next connection if the first one was lost.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from nats_stream_source.aio.tasks import run_to_completion
from nats_stream_source.errors import NatsSourceError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumer_config import ConsumerInfo, unacknowledged_config

_INACTIVE_THRESHOLD = 5_000_000_000  # nanoseconds


@contextlib.asynccontextmanager
async def temporary_consumer(
    jetstream: JetStream,
    stream: str,
    purpose: str,
    filters: Sequence[str] = (),
    **config: Any,
) -> AsyncIterator[ConsumerInfo]:
    """Create a consumer without acks in memory, and delete it at the end of the block.

    Args:
        purpose: a word of the consumer's name.
        filters: subjects; none for the whole stream.
        config: further fields of the configuration, as the server expects them.
    """
    name = f"{jetstream.connection.settings.consumer_prefix}-{purpose}-{uuid.uuid4().hex[:12]}"
    config = {"name": name, **unacknowledged_config(filters, _INACTIVE_THRESHOLD), **config}
    try:
        yield ConsumerInfo.parse(await jetstream.add_short_lived_consumer(stream, config))
    finally:
        with contextlib.suppress(NatsSourceError):
            await run_to_completion(jetstream.delete_consumer(stream, name))
