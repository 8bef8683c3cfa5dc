"""The ephemeral push consumer of an ordered reader: creation, placement and deletion.

An ordered consumer (ADR-15) is a series of ephemeral push consumers. :class:`EphemeralConsumer`
manages the current one. Each consumer has its own name and its own inbox, so frames of an earlier
consumer are never mixed with those of the current one.

Placement. The servers place a consumer on a random replica. With ``at_leader`` or ``server``, a
consumer on another server than the requested one is deleted, and the next one is created, up to
``_MAX_PLACEMENTS`` times. The inbox of the consumer is subscribed to only after the placement.

Several filters. Before nats-server 2.15, a purge of subjects that one filter of a consumer covers
(for example a PURGE marker in a bucket) moves the whole consumer to the first remaining message of
these subjects. The consumer skips the messages of its other filters before that message, and
neither sequences nor heartbeats show it (measured with 2.10.26 to 2.14.6). So on these servers one
filter that covers all of them takes their place (:class:`MergedFilter`), and the reader drops the
messages that match none of them. This transfers more data, at worst the whole stream.

Deletion. A consumer is deleted when the reader rebuilds it and when the reader closes. At the
close, a PING/PONG confirms that no frame of the consumer is left on the connection; if that fails,
the connection is dropped. The server removes a consumer that could not be deleted by itself, since
its deliver subject has no subscriber.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import nats.errors
import pyarrow as pa
import pyarrow.compute as pc

from nats_stream_source.aio.tasks import wait_cancellable
from nats_stream_source.connection.connection import Connection
from nats_stream_source.connection.inbox import AFTER_EACH, AFTER_MEDIUM, Inbox
from nats_stream_source.errors import (
    ConsumerNotFoundError,
    NatsSourceError,
    PermissionDeniedError,
    RequestTimeoutError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumers import ConsumerInfo, unacknowledged_config
from nats_stream_source.jetstream.ordered.request import RangeRequest
from nats_stream_source.jetstream.reusable_connection import ReusableConnection
from nats_stream_source.jetstream.subjects import covering, filter_pattern, is_literal
from nats_stream_source.logs import field_logger
from nats_stream_source.wire.columns import subjects
from nats_stream_source.wire.consumer.deliveries import Deliveries

log = field_logger(__name__)

# Nanoseconds. The server's default of 5 s is too short for a paused reader.
_INACTIVE_THRESHOLD = 60_000_000_000
_PONG_TIMEOUT = 2.0  # seconds; a server that sends no PONG for so long counts as lost …
_MAX_PONG_TIMEOUT = 60.0  # … unless data arrives: on a slow line the PONG follows all of it
_BULK = 20_000  # sequences of a range whose rate counts more than the delay of a message
_MAX_PLACEMENTS = 30  # consumers until one is placed on the leader; the placement is random
_FIXED_IN = (2, 15)  # skipped messages of consumers with several filters
_MAX_UNDELETED = 16  # older ones are left to the server, which removes them within a minute


class MergedFilter:
    """One filter in place of ``filters``.

    Attributes:
        subject: the filter that covers all of them.
    """

    def __init__(self, filters: Sequence[str]) -> None:
        self.subject = covering(filters)
        literals = [subject for subject in filters if is_literal(subject)]
        wild = [subject for subject in filters if not is_literal(subject)]
        self._literals = pa.array(literals, pa.string())
        self._pattern = filter_pattern(wild) if wild else None

    def select(self, rows: Deliveries) -> Deliveries:
        """The messages of ``rows`` that match one of the filters."""
        if not len(rows):
            return rows
        names = subjects(rows, replace=True)
        mask = pc.is_in(names, value_set=self._literals)
        if self._pattern is not None:
            mask = pc.or_(mask, pc.match_substring_regex(names, self._pattern))
        return rows.select(mask.to_numpy(zero_copy_only=False))


class EphemeralConsumer:
    """The current consumer of one :class:`RangeRequest`, and the earlier ones still to be deleted.

    Attributes:
        connection: the connection of the current consumer; None before :meth:`connect`.
        inbox: the subscription of its deliver subject; None while it has none.
        flow_control: whether the next consumer uses flow control.
        unbound: how many of the latest consumers in a row replaced a lost one and had no subscriber
            of their deliver subject at the server: it does not lead to this client.
        merged_filter: the filter that the current consumer has in place of the requested ones;
            None where it has the requested ones.
    """

    def __init__(self, connections: ReusableConnection, request: RangeRequest) -> None:
        self.connection: Connection | None = None
        self.inbox: Inbox | None = None
        self.flow_control = True
        self.unbound = 0
        self.merged_filter: MergedFilter | None = None
        self._connections = connections
        self._request = request
        self._prefix = f"{connections.settings.consumer_prefix}-{uuid.uuid4().hex[:16]}"
        self._serial = 0
        self._undeleted: list[str] = []
        self._reconnects = 0

    @property
    def name(self) -> str:
        """The consumer's name on the server."""
        return f"{self._prefix}-{self._serial}"

    @property
    def connection_lost(self) -> bool:
        """Whether the connection was lost since :meth:`connect`."""
        connection = self.connection
        return connection is None or (
            connection.reconnects != self._reconnects or not connection.client.is_connected
        )

    async def connect(self, *, verify: bool) -> None:
        """Obtain a connection for the next consumer; with ``verify``, it has just sent a PONG."""
        connection = await self._connections.connection(fresh=0.0 if verify else 1.0)
        self.connection = connection
        self._reconnects = connection.reconnects
        self._serial += 1

    async def create(self, position: int, seen_through: int, *, failures: int = 0) -> None:
        """Create a consumer that delivers from ``position`` on, and subscribe to its inbox.

        Args:
            failures: how many consumers in a row were lost before without progress.
        """
        request, connection = self._request, self.connection
        assert connection is not None
        self.merged_filter = None
        if len(request.filters) > 1 and not request.only_initial_values and _skips(connection):
            self.merged_filter = MergedFilter(request.filters)
            request = replace(request, filters=(self.merged_filter.subject,))
        config = consumer_config(
            request,
            position,
            connection.client.new_inbox(),
            seen_through=seen_through,
            flow_control=self.flow_control,
        )
        jetstream = JetStream(connection)
        server = request.server
        if request.at_leader:
            server = await self._stream_leader(jetstream)
        if server is not None:
            await self._create_at(server, jetstream, config)
        else:
            await self._open_inbox(connection, config["deliver_subject"])
            self._undeleted.append(self.name)
        if server is None or failures:
            # A repeated creation, after that on the server, returns the info of the consumer.
            created = await self._add(jetstream, config)
            self.unbound = min(self.unbound + 1, failures) if not created.push_bound else 0

    async def _add(self, jetstream: JetStream, config: dict[str, Any]) -> ConsumerInfo:
        named = {"name": self.name, **config}
        response = await jetstream.add_short_lived_consumer(self._request.stream, named)
        return ConsumerInfo.parse(response)

    async def _stream_leader(self, jetstream: JetStream) -> str | None:
        """The stream leader, once it has ``end``; None where the stream has one replica."""
        request = self._request
        info = await jetstream.stream_info(request.stream)
        if not info.replicated:
            return None
        if info.leader is None or info.last_seq < request.target:
            raise RequestTimeoutError(
                f"could not place a consumer on the leader of stream {request.stream!r}: leader "
                f"{info.leader!r} has last sequence {info.last_seq}, expected an elected leader "
                f"with {request.target} or later; retry"
            )
        return info.leader

    async def _create_at(self, server: str, jetstream: JetStream, config: dict[str, Any]) -> None:
        """Create consumers until one is placed on ``server``."""
        connection = jetstream.connection
        for _ in range(_MAX_PLACEMENTS):
            self._undeleted.append(self.name)
            created = await self._add(jetstream, config)
            if created.leader == server:
                # Subscribed to only now: a consumer sends nothing without a subscriber, and a
                # misplaced consumer would send as much as flow control permits.
                await self._open_inbox(connection, config["deliver_subject"])
                return
            # Where the deletion is denied, the server removes the consumer a minute later.
            with contextlib.suppress(PermissionDeniedError):
                await self._delete_last(connection)
            self._serial += 1
            config["deliver_subject"] = connection.client.new_inbox()
        raise RequestTimeoutError(
            f"could not place a consumer on server {server!r} after {_MAX_PLACEMENTS} attempts: "
            f"the servers placed every consumer of stream {self._request.stream!r} on another "
            f"replica; retry"
        )

    async def is_alive(self) -> bool:
        """Whether a PONG follows a PING; all frames that were sent before it have then arrived."""
        assert self.connection is not None
        return await self.connection.alive(_PONG_TIMEOUT, _MAX_PONG_TIMEOUT)

    async def discard(self) -> None:
        """Unsubscribe from the consumer and delete it, with the earlier ones not yet deleted."""
        connection = self.connection
        assert connection is not None
        await self._release_inbox()
        if connection.client.is_connected:
            # After a failure the consumer may still exist: the next discard, or the close, retries.
            with contextlib.suppress(asyncio.TimeoutError, NatsSourceError, nats.errors.Error):
                while self._undeleted:
                    await wait_cancellable(_PONG_TIMEOUT, self._delete_last(connection))
        del self._undeleted[:-_MAX_UNDELETED]

    async def close(self) -> None:
        """Delete all consumers and make sure that none of their frames reaches a later reader."""
        connection = self.connection
        if connection is None or not self._undeleted:
            return
        drained = False
        try:
            await self._release_inbox()
            await connection.wait_connected(_PONG_TIMEOUT)
            # All frames that the server sent before the UNSUB precede the PONG.
            drained = await connection.alive(_PONG_TIMEOUT)
            while drained and self._undeleted:
                await self._delete_last(connection)
        except (NatsSourceError, nats.errors.Error, OSError) as error:
            log.warning(
                "a consumer could not be deleted; the server removes it by itself",
                stream=self._request.stream,
                consumer=self._undeleted[-1],
                error=error,
            )
        if not drained:
            await self._connections.drop()

    async def _delete_last(self, connection: Connection) -> None:
        # Already deleted: the intended state.
        with contextlib.suppress(ConsumerNotFoundError, StreamNotFoundError):
            name = self._undeleted[-1]
            await JetStream(connection).delete_consumer(self._request.stream, name)
        self._undeleted.pop()

    async def _open_inbox(self, connection: Connection, subject: str) -> None:
        self.inbox = await connection.open_inbox(subject)
        request = self._request
        if request.accumulate:
            self.inbox.accumulate = AFTER_EACH
        elif not request.eager and request.end - request.start > _BULK:
            self.inbox.accumulate = AFTER_MEDIUM

    async def _release_inbox(self) -> None:
        inbox, self.inbox = self.inbox, None
        if inbox is not None and self.connection is not None:
            await self.connection.close_inbox(inbox)


def _skips(connection: Connection) -> bool:
    """Whether consumers with several filters may skip messages on the connected server."""
    version = connection.client.connected_server_version
    try:
        return (version.major, version.minor) < _FIXED_IN
    except ValueError:
        return True  # the server's version is not a version number


def consumer_config(
    request: RangeRequest,
    position: int,
    deliver_subject: str,
    *,
    seen_through: int = 0,
    flow_control: bool = True,
) -> dict[str, Any]:
    """The configuration of one consumer for ``request``.

    The delivery starts after ``position``, the last stream sequence that was kept. Initial values
    (``last_per_subject``) start from the first subject again: if they started at a sequence, the
    rest of them would be delivered with their full history. They are complete once the server has
    processed ``min_last_seq`` (``seen_through``).
    """
    config: dict[str, Any] = {
        **unacknowledged_config(request.filters, _INACTIVE_THRESHOLD),
        "deliver_subject": deliver_subject,
        "max_deliver": 1,
        "idle_heartbeat": round(request.heartbeat * 1e9),
    }
    initial_complete = request.min_last_seq is not None and seen_through >= request.min_last_seq
    if request.last_per_subject and not initial_complete:
        config["deliver_policy"] = "last_per_subject"
    else:
        config["deliver_policy"] = "by_start_sequence"
        config["opt_start_seq"] = position + 1
    if flow_control:
        config["flow_control"] = True
    if request.headers_only:
        config["headers_only"] = True
    return config
