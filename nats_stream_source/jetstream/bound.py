"""The consumer that a subscription stands on, and whose it is (ADR-15, "Unsubscribe and Drain")."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from nats_stream_source.errors import (
    ConsumerDeletedError,
    ConsumerNotFoundError,
    NatsSourceError,
    StreamNotFoundError,
)
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.consumer_config import ConsumerInfo
from nats_stream_source.jetstream.finishing import finish
from nats_stream_source.logs import field_logger

log = field_logger(__name__)

OnError = Callable[[Exception], None]
"""Gets what would else be raised to whoever iterates."""

_S = TypeVar("_S", bound="Closing")


class BoundConsumer:
    """A consumer in use.

    Attributes:
        jetstream: where it is.
        info: what the server said of it when the subscription began.
        created: whether this library created it for the subscription, and so deletes it at the
            end. A durable consumer that was there before is left alone.
    """

    def __init__(self, jetstream: JetStream, info: ConsumerInfo, *, created: bool) -> None:
        self.jetstream = jetstream
        self.info = info
        self.created = created

    def __repr__(self) -> str:
        whose = "created" if self.created else "found"
        return f"<BoundConsumer {self.info.stream} {self.info.name} {whose}>"

    @property
    def where(self) -> str:
        """Its name for messages."""
        return f"consumer {self.info.name!r} of stream {self.info.stream!r}"

    async def delete(self) -> None:
        """Delete it if it was created for this subscription; once.

        Raises:
            ApiError, RequestTimeoutError, …: as the server's answer, or its absence.
        """
        if self.created:
            self.created = False
            await finish(self.jetstream.delete_consumer(self.info.stream, self.info.name))

    async def check(self) -> None:
        """Ask whether it is still there.

        A push consumer that is gone is only silent. An answer that does not come says nothing: it
        may be the connection, or a user who may not ask.

        Raises:
            ConsumerDeletedError: it is gone, or its stream is.
        """
        try:
            await self.jetstream.consumer_info(self.info.stream, self.info.name)
        except (ConsumerNotFoundError, StreamNotFoundError) as error:
            self.created = False
            raise ConsumerDeletedError(
                f"{self.where} is gone: it was deleted, or nobody listened for longer than its "
                f"inactive_threshold",
                description="Consumer Deleted",
            ) from error
        except NatsSourceError as error:
            log.debug("no answer", consumer=self.where, error=error)


class Closing:
    """A subscription as an async context manager: leaving it unsubscribes.

    Attributes:
        consumer: the consumer that it stands on.
    """

    consumer: BoundConsumer
    _on_error: OnError | None
    _sealed: bool
    _closed: bool

    @property
    def info(self) -> ConsumerInfo:
        """The consumer as it was when the subscription began."""
        return self.consumer.info

    @property
    def _state(self) -> str:
        return "closed" if self._closed else "draining" if self._sealed else "open"

    async def unsubscribe(self) -> None:
        """End the subscription."""
        raise NotImplementedError

    def _report(self, error: NatsSourceError) -> None:
        if self._on_error is None:
            raise error
        self._on_error(error)

    async def _finish(self) -> None:
        """After the last message of a drained one (ADR-15, "Drain")."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.consumer.delete()
        except NatsSourceError as error:
            self._report(error)

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
        except NatsSourceError as failed:
            if error is None:
                raise
            log.warning("not unsubscribed", consumer=self.consumer.where, error=failed)
