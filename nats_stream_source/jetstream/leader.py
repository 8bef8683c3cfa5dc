"""Reads that depend on the stream leader's state: a lower last sequence, and read-after-write.

*Lower last sequence.* A server that was cut off from its peers responds for 10 to 20 s as if it
were still the leader, with its old state. As long as it does not hear from its replicas, the stream
info shows that (``StreamInfo.verify_majority``). When it is connected to them again, it has heard
from them for a moment before it learns that they elected another leader. So a lower last sequence
must be confirmed by a second response of the same server (:func:`verify_last_seq`).

*Read-after-write (ADR-53).* A read returns at least what was written. A write returns its stream
sequence, and the reader passes it as ``min_last_seq``. According to ADR-53 each server keeps that
promise, but released servers do not: some ignore the field, some refuse it
(docs/internals/measurements.md, Servers 1), so it is not sent and the client keeps the promise. Two
responses prove that a read is recent enough:

- a message whose sequence is ``min_last_seq`` or higher: its sender has reached that sequence;
- the leader's message get, once the leader's last sequence has reached ``min_last_seq``
  (:func:`wait_for_last_seq`).

A deposed leader may for a moment respond with its old state, which only a server can detect.

Deleting or purging messages through the API does not write a message. So no sequence stands for it,
and read-after-write does not apply (ADR-53, "A note about message deletion and purges").
"""

from __future__ import annotations

import asyncio
from typing import Any

from nats_stream_source.aio.tasks import wait_cancellable
from nats_stream_source.errors import MinLastSequenceError, NatsSourceError, RequestTimeoutError
from nats_stream_source.jetstream.api import JetStream, StoredMessage
from nats_stream_source.jetstream.retry import Backoff, is_transient, retry
from nats_stream_source.jetstream.stream_info import StreamInfo

_CONFIRM_DELAY = 1.0  # seconds; a deposed leader that hears of the new one steps down in ms
_BACKOFF = Backoff(0.01, 0.25)  # between two requests to the leader


async def verify_last_seq(jetstream: JetStream, info: StreamInfo, seq: int) -> None:
    """Confirm that the last sequence of a stream, which was ``seq`` before, is lower now.

    Raises RequestTimeoutError if a second response does not confirm that of ``info``.
    """
    info.verify_majority()
    if not info.replicated:
        return
    await asyncio.sleep(_CONFIRM_DELAY)
    now = await jetstream.stream_info(info.name)
    info.verify_same_leader(now, info.last_seq)
    if now.last_seq >= seq:
        raise RequestTimeoutError(
            f"could not confirm the last sequence of stream {info.name}: its leader first reported "
            f"{info.last_seq}, then {now.last_seq}; retry",
            settings=(),
        )


async def wait_for_last_seq(
    jetstream: JetStream, stream: str, min_last_seq: int | None, timeout: float | None = None
) -> StreamInfo:
    """The leader's stream info, once its last sequence is ``min_last_seq`` or higher.

    Args:
        min_last_seq: None returns the first response.
        timeout: seconds; the connection's ``request_timeout`` if None. Transient failures (no
            leader, no response, lost connection) are retried until then.

    Raises:
        MinLastSequenceError: the leader did not reach it in time (412, 10180).
        RequestTimeoutError, ConnectError, ApiError: the last failure, if the leader never
            responded; StreamNotFoundError at once.
    """
    if min_last_seq is None:
        return await jetstream.stream_info(stream)
    settings = () if timeout is not None else ("request_timeout",)
    seconds = jetstream.connection.settings.request_timeout if timeout is None else timeout
    failure: NatsSourceError = RequestTimeoutError(
        f"could not read the last sequence of stream {stream}: no response within {seconds:g} s",
        settings=settings,
    )

    async def reach() -> StreamInfo:
        info = await jetstream.stream_info(stream)
        if info.last_seq < min_last_seq:
            raise MinLastSequenceError(
                f"min last sequence: stream {stream} has reached {info.last_seq}, not "
                f"{min_last_seq}, within {seconds:g} s (412, 10180); a sequence that the stream "
                f"never had belongs to another stream, or to the stream before it was restored",
                settings=settings,
            )
        return info

    def is_retried(error: Exception) -> bool:
        nonlocal failure
        if isinstance(error, MinLastSequenceError):
            failure = error
        elif not is_transient(error):
            return False
        elif isinstance(error, NatsSourceError) and not isinstance(failure, MinLastSequenceError):
            failure = error  # a timeout after the leader's response does not count
        return True

    try:
        return await wait_cancellable(
            max(seconds, _BACKOFF.first), retry(reach, backoff=_BACKOFF, on_error=is_retried)
        )
    except asyncio.TimeoutError:
        raise failure from None


async def leader_message(
    jetstream: JetStream,
    stream: str,
    *,
    min_last_seq: int | None = None,
    timeout: float | None = None,
    **request: Any,
) -> StoredMessage | None:
    """Get a message from the leader (``STREAM.MSG.GET``), once it has reached ``min_last_seq``.

    ``timeout`` and errors are those of :func:`wait_for_last_seq`, ``request`` and further errors
    those of :meth:`JetStream.message`.
    """
    if min_last_seq is not None:
        await wait_for_last_seq(jetstream, stream, min_last_seq, timeout)
    return await jetstream.message(stream, **request)
