"""Flow-control replies of a push subscription (ADR-15, "Flow Control").

The server stops delivering until it receives the reply to its flow-control request. It repeats the
subject of a missing reply as ``Nats-Consumer-Stalled`` in its idle heartbeats. A reply can be lost
on its way (a route, a leaf node, a gateway), so each heartbeat that still reports the consumer as
stalled after a reply gets another one. Several of them in a row show that replies do not reach the
server at all.
"""

from __future__ import annotations

import asyncio

import nats.errors

from nats_stream_source.errors import FlowControlLostError
from nats_stream_source.jetstream.subscriptions.bound_consumer import BoundConsumer
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.consumer.status import ConsumerStatus

log = field_logger(__name__)

_MAX_STALLED_HEARTBEATS = 3


class FlowControlReplies:
    """Answers the flow-control requests of one consumer."""

    def __init__(self, consumer: BoundConsumer) -> None:
        self._consumer = consumer
        self._connection = consumer.jetstream.connection
        self._last_subject: str | None = None
        self._last_reply_time = 0.0
        self._stalled_heartbeats = 0

    def reset(self) -> None:
        """Answer the last subject again when the server repeats it."""
        self._last_subject = None

    async def handle(self, status: ConsumerStatus, received_at: float) -> None:
        """Handle a control status (100): a flow-control request or an idle heartbeat.

        Args:
            status: the status.
            received_at: event loop time at which it was received.

        Raises:
            FlowControlLostError: several heartbeats report a stalled consumer after the reply.
        """
        if status.reply is not None:
            await self._reply(status.reply)
        elif status.stalled is not None:
            if status.stalled != self._last_subject:
                await self._reply(status.stalled)
            else:
                await self._handle_stalled_after_reply(status.stalled, received_at)
        else:
            self._stalled_heartbeats = 0

    async def _reply(self, subject: str) -> None:
        if subject != self._last_subject and await self._publish(subject):
            self._stalled_heartbeats = 0

    async def _publish(self, subject: str) -> bool:
        try:
            await self._connection.publish(subject)
        except (nats.errors.Error, OSError) as error:
            # The next heartbeat repeats the request.
            log.warning(
                "could not send flow-control reply", consumer=self._consumer.label, error=error
            )
            return False
        self._last_subject = subject
        self._last_reply_time = asyncio.get_running_loop().time()
        return True

    async def _handle_stalled_after_reply(self, subject: str, received_at: float) -> None:
        # A heartbeat received within one interval may have been sent before the reply.
        if received_at < self._last_reply_time + (self._consumer.info.heartbeat or 0.0):
            return
        self._stalled_heartbeats += 1
        if self._stalled_heartbeats >= _MAX_STALLED_HEARTBEATS:
            self._stalled_heartbeats = 0
            raise FlowControlLostError(
                f"{self._consumer.label} is stalled: {_MAX_STALLED_HEARTBEATS} heartbeats report "
                f"that flow-control replies did not reach the server; add '$JS.FC.>' to the user's "
                f"permissions or to the account's imports"
            )
        await self._publish(subject)
