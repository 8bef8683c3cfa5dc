"""The consumer of a subscription, and whether the subscription owns it (ADR-15, "Unsubscribe and
Drain").
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from nats_stream_source.aio.tasks import run_to_completion
from nats_stream_source.errors import (
    ConsumerDeletedError,
    ConsumerNotFoundError,
    NatsSourceError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumer_config import ConsumerInfo
from nats_stream_source.logs import field_logger

log = field_logger(__name__)

OnError = Callable[[Exception], None]
"""Receives the errors that the iteration would raise otherwise."""

_S = TypeVar("_S", bound="BaseSubscription")


class BoundConsumer:
    """A consumer in use by one subscription.

    Attributes:
        jetstream: the JetStream context of the consumer.
        info: the consumer's info at the start of the subscription.
        created: True if this library created the consumer for the subscription. It is then deleted
            at the end. A durable consumer that existed before is not deleted.
    """

    def __init__(self, jetstream: JetStream, info: ConsumerInfo, *, created: bool) -> None:
        self.jetstream = jetstream
        self.info = info
        self.created = created

    def __repr__(self) -> str:
        origin = "created" if self.created else "existing"
        return f"<BoundConsumer {self.info.stream} {self.info.name} {origin}>"

    @property
    def label(self) -> str:
        """The consumer and its stream, for messages."""
        return f"consumer {self.info.name!r} of stream {self.info.stream!r}"

    async def delete(self) -> None:
        """Delete the consumer if it was created for this subscription. Later calls do nothing.

        Raises:
            ApiError, RequestTimeoutError, …: the deletion failed, or the server did not respond.
        """
        if self.created:
            self.created = False
            await run_to_completion(
                self.jetstream.delete_consumer(self.info.stream, self.info.name)
            )

    async def verify_exists(self) -> None:
        """Verify that the consumer still exists.

        A deleted push consumer only stops sending. A missing response is not an error here: the
        connection may be lost, or the user may lack the permission for the request.

        Raises:
            ConsumerDeletedError: the consumer or its stream was deleted.
        """
        try:
            await self.jetstream.consumer_info(self.info.stream, self.info.name)
        except (ConsumerNotFoundError, StreamNotFoundError) as error:
            self.created = False
            raise ConsumerDeletedError(
                f"subscription to {self.label} failed: the consumer no longer exists, it was "
                f"deleted or had no subscriber for longer than its inactive_threshold; subscribe "
                f"again",
                description="Consumer Deleted",
            ) from error
        except NatsSourceError as error:
            log.debug("could not verify consumer", consumer=self.label, error=error)


class BaseSubscription:
    """A subscription as an async context manager. Leaving the context unsubscribes.

    Attributes:
        consumer: the consumer of the subscription.
    """

    def __init__(self, consumer: BoundConsumer, on_error: OnError | None) -> None:
        self.consumer = consumer
        self._on_error = on_error
        self._draining = False
        self._closed = False

    @property
    def info(self) -> ConsumerInfo:
        """The consumer's info at the start of the subscription."""
        return self.consumer.info

    @property
    def _state(self) -> str:
        return "closed" if self._closed else "draining" if self._draining else "open"

    async def unsubscribe(self) -> None:
        """End the subscription."""
        raise NotImplementedError

    def _report_error(self, error: NatsSourceError) -> None:
        if self._on_error is None:
            raise error
        self._on_error(error)

    async def _finish(self) -> None:
        """Delete the consumer after the last drained message (ADR-15, "Drain")."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.consumer.delete()
        except NatsSourceError as error:
            self._report_error(error)

    async def __aenter__(self: _S) -> _S:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.unsubscribe()
        except NatsSourceError as cleanup_error:
            if error is None:
                raise
            log.warning("unsubscribe failed", consumer=self.consumer.label, error=cleanup_error)
