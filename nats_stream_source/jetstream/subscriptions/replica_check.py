"""Position of the replica that serves a consumer (ADR-53, "Consumers").

No released server honours ``min_last_seq`` in a consumer's configuration
(docs/internals/measurements.md, Servers 1). The document
requires that nothing is delivered, and that ``num_pending`` is not used, before the server that
serves the consumer has the sequence. This module verifies that from the client:

1. The stream leader must have the sequence (``leader.py``). In a stream without replicas this is
   the proof: the consumer reads the only store.
2. In a replicated stream the consumer reads the store of the consumer leader. If that server is
   also the stream leader, the proof holds.
3. Otherwise a second, short-lived consumer that starts at ``min_last_seq`` is created, repeatedly
   until the servers, which place consumers at random, place one on that server. Its first message,
   or the ``Nats-Last-Stream`` of its heartbeats, shows the position of that store
   (docs/internals/measurements.md, Servers 2).

The heartbeats of the consumer itself would show it too, but only after it delivered all earlier
messages. With acks it may wait long before that.
"""

from __future__ import annotations

import asyncio

from nats_stream_source.aio.tasks import wait_cancellable
from nats_stream_source.errors import MinLastSequenceError, NatsSourceError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumer_config import ConsumerInfo
from nats_stream_source.jetstream.leader import wait_for_last_seq
from nats_stream_source.jetstream.retry import is_transient
from nats_stream_source.jetstream.subscriptions.buffer import MessageBuffer
from nats_stream_source.jetstream.subscriptions.message import JsMessage
from nats_stream_source.jetstream.temporary_consumer import temporary_consumer
from nats_stream_source.wire.consumer.status import ConsumerStatus

_HEARTBEAT = 0.1  # seconds, the shortest interval that servers accept


async def wait_for_consumer_replica(
    jetstream: JetStream, info: ConsumerInfo, min_last_seq: int, timeout: float
) -> None:
    """Wait until the store that serves a consumer has ``min_last_seq``.

    Args:
        jetstream: the JetStream context.
        info: the consumer.
        min_last_seq: the stream sequence to wait for.
        timeout: seconds.

    Raises:
        MinLastSequenceError: not reached in time, or not verifiable (412, 10180).
        NatsSourceError: as for the wait for the stream leader in ``leader.py``.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    await wait_for_last_seq(jetstream, info.stream, min_last_seq, timeout)
    # Not `retry`: the probe of another server repeats without a pause, after a new response.
    while (remaining := deadline - loop.time()) > 0:
        try:
            if await wait_cancellable(
                remaining, _replica_has_sequence(jetstream, info, min_last_seq)
            ):
                return
        except asyncio.TimeoutError:
            break
        except NatsSourceError as error:
            if not is_transient(error):
                raise
            await asyncio.sleep(_HEARTBEAT)
    raise MinLastSequenceError(
        f"could not verify the min last sequence of consumer {info.name!r} of stream "
        f"{info.stream!r}: its replica did not reach {min_last_seq} within {timeout:g} s, its "
        f"replica lags; retry or increase 'reach_timeout' (412, 10180)",
        settings=("reach_timeout",),
    )


async def _replica_has_sequence(
    jetstream: JetStream, info: ConsumerInfo, min_last_seq: int
) -> bool:
    """Check once which server serves the consumer and whether it has the sequence."""
    stream = await jetstream.stream_info(info.stream)
    if stream.last_seq < min_last_seq:
        # Not the leader that had the sequence: a newly elected leader, or a former one that has not
        # stepped down yet.
        await asyncio.sleep(_HEARTBEAT)
        return False
    if not stream.replicated:
        return True
    # Elections move both leaders, so both are requested each time.
    server = ConsumerInfo.parse(await jetstream.consumer_info(info.stream, info.name)).leader
    if server is None:
        await asyncio.sleep(_HEARTBEAT)
        return False
    if server == stream.leader:
        return True
    return await _probe_replica(jetstream, info, server, min_last_seq)


async def _probe_replica(
    jetstream: JetStream, info: ConsumerInfo, server: str, min_last_seq: int
) -> bool:
    """Probe with one consumer that starts at ``min_last_seq``.

    Returns False if the consumer was placed on another server than ``server``, or if its messages
    were lost. On ``server``, waits until that server has the sequence, then returns True.
    """
    connection = jetstream.connection
    deliver_subject = connection.client.new_inbox()
    inbox = await connection.open_inbox(deliver_subject)
    buffer = MessageBuffer(connection, inbox, acks=False)
    try:
        async with temporary_consumer(
            jetstream,
            info.stream,
            "reach",
            deliver_policy="by_start_sequence",
            opt_start_seq=max(min_last_seq, 1),
            deliver_subject=deliver_subject,
            max_deliver=1,
            headers_only=True,
            flow_control=True,
            idle_heartbeat=round(_HEARTBEAT * 1e9),
        ) as created:
            return created.leader == server and await _receives_sequence(buffer, min_last_seq)
    finally:
        await buffer.close()


async def _receives_sequence(buffer: MessageBuffer, min_last_seq: int) -> bool:
    """Wait for a message or heartbeat that shows the sequence; False after missed heartbeats."""
    while True:
        item = buffer.next_item()
        if isinstance(item, JsMessage):
            # Server 2.10 moves a start beyond the end back to the end and then delivers an
            # older message (docs/internals/measurements.md, Servers 8).
            if item.metadata.stream_seq >= min_last_seq:
                return True
        elif isinstance(item, ConsumerStatus):
            if (item.last_stream or 0) >= min_last_seq:
                return True
        else:
            await buffer.wait(3 * _HEARTBEAT)
            if buffer.idle_seconds >= 3 * _HEARTBEAT:
                return False  # messages were lost; the caller retries with another consumer
