"""Whether acknowledgements reach the server.

An acknowledgement is a message without a response (ADR-15, "JSAck"), so one that leads nowhere
looks like one that arrived, and the message is delivered again after the consumer's ack wait. Two
causes can be observed:

- the user may not publish to ``$JS.ACK``: the server reports the violation, apart from the
  acknowledgement. It is logged, and every later acknowledgement is an error;
- an account import lacks ``$JS.ACK``: over an import, the first acknowledgement of each stream is
  sent as a request. Without the import it has no responders, which is an error at once.
"""

from __future__ import annotations

from nats_stream_source.connection.connection import Connection
from nats_stream_source.errors import (
    JetStreamNotEnabledError,
    PermissionDeniedError,
    RequestTimeoutError,
)
from nats_stream_source.jetstream.subjects import is_account_import
from nats_stream_source.logs import field_logger

log = field_logger(__name__)

_PREFIX = "$JS.ACK."


class AckRoute:
    """The way of acknowledgements of one connection: a service of the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._imported = is_account_import(connection.settings.api_prefix)
        self._verified: set[str] = set()
        self._denied = False

    def on_denied(self, subject: str | None, error: Exception) -> None:
        """The server denied an acknowledgement, if ``subject`` is that of one."""
        if subject is not None and subject.startswith(_PREFIX) and not self._denied:
            self._denied = True
            log.warning("acknowledgements are denied", subject=_PREFIX + ">", error=error)

    async def close(self) -> None:
        """Nothing to close."""

    async def publish(self, reply: str, stream: str, payload: bytes) -> None:
        """Publish an acknowledgement.

        Raises:
            PermissionDeniedError: the server has denied an acknowledgement of this connection.
            JetStreamNotEnabledError: the account does not import ``$JS.ACK``.
            nats.errors.Error, OSError: it could not be published.
        """
        if self._denied:
            raise PermissionDeniedError(
                f"the server denied the subject '{_PREFIX}>'; add it to the user's permissions"
            )
        if self._imported and stream not in self._verified:
            await self.request(reply, stream, payload)
            return
        await self._connection.publish(reply, payload)

    async def request(self, reply: str, stream: str, payload: bytes) -> None:
        """Publish an acknowledgement and wait until the server confirms it.

        Raises:
            as :meth:`publish`, and RequestTimeoutError: not confirmed in time. For the first
            acknowledgement over an import that is not an error of :meth:`publish`: an import may
            pass acknowledgements and no confirmations.
        """
        try:
            await self._connection.request(reply, payload)
        except JetStreamNotEnabledError as error:
            if not self._imported:
                raise
            raise JetStreamNotEnabledError(
                f"'{_PREFIX}{stream}.>' has no responders: the account does not import it; export "
                f"and import '{_PREFIX}{stream}.>' as a service"
            ) from error
        except RequestTimeoutError:
            if not self._imported or stream in self._verified:
                raise
            log.warning("acknowledgement was not confirmed over the import", stream=stream)
        self._verified.add(stream)
