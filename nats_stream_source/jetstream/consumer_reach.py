"""How far the replica that serves a consumer has got (ADR-53, "Consumers").

``min_last_seq`` in a consumer's configuration is honoured by no released server (DESIGN 3.1). What
the document wants with it, that nothing is delivered and ``num_pending`` is not looked at before
the server that serves the consumer has the sequence, is kept from outside:

1. The stream's leader must have it (:func:`read_after_write.reached`). In a stream without
   replicas that is the proof: there is one store, and the consumer reads it.
2. In a replicated stream the consumer is served by the store of its own leader. If that is the
   stream's leader, the proof stands.
3. Else a second, short-lived consumer is made that starts at ``min_last_seq``, again and again
   until one is placed on that very server (servers place consumers at random). Its first message,
   or its heartbeats' ``Nats-Last-Stream``, tell how far that store is (DESIGN 3.2).

The consumer's own heartbeats would tell too, but only once it has delivered all before, and with
acks it may stand still long before that.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from nats_stream_source.errors import MinLastSequenceError, NatsSourceError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.arrivals import Arrivals
from nats_stream_source.jetstream.consumer_config import ConsumerInfo
from nats_stream_source.jetstream.finishing import finish
from nats_stream_source.jetstream.message import JsMessage
from nats_stream_source.jetstream.patience import passes
from nats_stream_source.jetstream.read_after_write import reached
from nats_stream_source.jetstream.within import within
from nats_stream_source.wire.status import Status

_HEARTBEAT = 0.1  # seconds, the shortest there is


async def consumer_reached(
    jetstream: JetStream, info: ConsumerInfo, min_last_seq: int, timeout: float
) -> None:
    """Wait until the store that serves a consumer has ``min_last_seq``.

    Args:
        timeout: seconds.

    Raises:
        MinLastSequenceError: it has not in time, or nobody could tell (412, 10180).
        NatsSourceError: as :func:`read_after_write.reached`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    await reached(jetstream, info.stream, min_last_seq, timeout)
    while (left := deadline - loop.time()) > 0:
        try:
            if await within(left, _look(jetstream, info, min_last_seq)):
                return
        except asyncio.TimeoutError:
            break
        except NatsSourceError as error:
            if not passes(error):
                raise
            await asyncio.sleep(_HEARTBEAT)
    raise MinLastSequenceError(
        f"min last sequence: the server of consumer {info.name!r} of stream {info.stream!r} is not "
        f"known to have reached {min_last_seq} within {timeout:g} s: its replica lags (412, 10180)"
    )


async def _look(jetstream: JetStream, info: ConsumerInfo, min_last_seq: int) -> bool:
    """One look at who serves the consumer, and how far that store is."""
    stream = StreamInfo.parse(await jetstream.call(f"STREAM.INFO.{info.stream}"))
    if stream.last_seq < min_last_seq:
        # Another leader than the one that had it: one elected since, or deposed and not aware.
        await asyncio.sleep(_HEARTBEAT)
        return False
    if not stream.replicated:
        return True
    # Elections move both leaders, so both are asked for each time.
    server = ConsumerInfo.parse(await jetstream.consumer_info(info.stream, info.name)).leader
    if server is None:
        await asyncio.sleep(_HEARTBEAT)
        return False
    if server == stream.leader:
        return True
    return await _probe(jetstream, info, server, min_last_seq)


async def _probe(jetstream: JetStream, info: ConsumerInfo, server: str, min_last_seq: int) -> bool:
    """One consumer that starts at ``min_last_seq``; True when it is on ``server`` and that has it.

    False when it is somewhere else. On the right server, waits.
    """
    connection = jetstream.connection
    name = f"{connection.settings.consumer_prefix}-reach-{uuid.uuid4().hex[:12]}"
    config = {
        "name": name,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": max(min_last_seq, 1),
        "deliver_subject": connection.client.new_inbox(),
        "ack_policy": "none",
        "max_deliver": 1,
        "headers_only": True,
        "flow_control": True,
        "idle_heartbeat": round(_HEARTBEAT * 1e9),
        "inactive_threshold": 5_000_000_000,
        "mem_storage": True,
        "num_replicas": 1,
    }
    inbox = await connection.inbox(str(config["deliver_subject"]))
    arrivals = Arrivals(connection, inbox, acks=False)
    try:
        made = ConsumerInfo.parse(await jetstream.add_consumer(info.stream, config))
        if made.leader != server:
            return False
        while True:
            item = arrivals.pop()
            if isinstance(item, JsMessage):
                # 2.10 moves a start beyond the end back to it (DESIGN 3.8): an older message.
                if item.metadata.stream_seq >= min_last_seq:
                    return True
            elif isinstance(item, Status):
                if (item.last_stream or 0) >= min_last_seq:
                    return True
            else:
                await arrivals.wait(3 * _HEARTBEAT)
                if arrivals.silence >= 3 * _HEARTBEAT:
                    return False  # lost: the next one may do better
    finally:
        await arrivals.close()
        # Where this fails, the server removes it by itself, for nobody listens.
        with contextlib.suppress(NatsSourceError):
            await finish(jetstream.delete_consumer(info.stream, name))
