"""Read-after-write (ADR-53): what is read has at least what was written.

A write returns its stream sequence, and the reader names it (``min_last_seq``). The document has
the servers keep that promise, each for itself, but no released one does: some ignore the field,
some refuse it (DESIGN 3.1). So it is kept here. Two things prove that an answer is not too old:

- a message whose sequence is ``min_last_seq`` or later: whoever sent it has got that far;
- the leader: once its last sequence has reached ``min_last_seq`` (:func:`reached`), its message
  get has too.

A leader that was deposed and does not know it yet may, for a moment, answer with what it has. Only
a server that honours the field sees that; so the field is sent along where a probe was answered
with 412 (:func:`leader_message`), and nothing else hangs on it.

Deleting or purging messages through the API writes no message, so no sequence stands for it and
nothing is promised (ADR-53, "A note about message deletion and purges").
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from nats_stream_source.errors import (
    ApiError,
    MinLastSequenceError,
    NatsSourceError,
    RequestTimeoutError,
)
from nats_stream_source.jetstream.api import JetStream, StoredMessage, StreamInfo
from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.patience import passes
from nats_stream_source.jetstream.within import within

_IMPOSSIBLE = 1 << 62  # a sequence that no stream reaches
_UNKNOWN_FIELD = 10025  # err_code of 2.12 and later for a request with a field they do not have
_FIRST_PAUSE = 0.01  # seconds between two looks at the leader; doubles up to …
_LONGEST_PAUSE = 0.25

_honoured: weakref.WeakKeyDictionary[Connection, tuple[int, bool]] = weakref.WeakKeyDictionary()
"""For each connection, how often it had been made anew when it was probed, and the outcome."""


async def reached(
    jetstream: JetStream, stream: str, min_last_seq: int, timeout: float | None = None
) -> StreamInfo:
    """Wait until the leader's last sequence is ``min_last_seq`` or later.

    Args:
        timeout: seconds; the connection's ``request_timeout`` when None. A failure that passes (no
            leader, no answer, connection lost) is waited for too.

    Returns:
        What the leader said then.

    Raises:
        MinLastSequenceError: it is not there in time (412, 10180).
        RequestTimeoutError, ConnectError, ApiError: no answer by then; StreamNotFoundError at once.
    """
    loop = asyncio.get_running_loop()
    given = jetstream.connection.settings.request_timeout if timeout is None else timeout
    deadline = loop.time() + given
    pause = _FIRST_PAUSE
    info: StreamInfo | None = None  # the last answer: a later silence does not make it unsaid
    while True:
        left = max(deadline - loop.time(), _FIRST_PAUSE)
        try:
            info = await within(left, jetstream.stream_info(stream))
        except asyncio.TimeoutError:
            failure: NatsSourceError = RequestTimeoutError(
                f"nobody said within {given:g} s how far stream {stream} is"
            )
        except NatsSourceError as error:
            if not passes(error):
                raise
            failure = error
        if info is not None and info.last_seq >= min_last_seq:
            return info
        left = deadline - loop.time()
        if left <= 0:
            if info is None:
                raise failure
            raise MinLastSequenceError(
                f"min last sequence: stream {stream} has reached {info.last_seq}, not "
                f"{min_last_seq}, within {given:g} s (412, 10180). A sequence that the stream "
                f"never had is another stream's, or from before it was restored"
            )
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


async def info_with(
    jetstream: JetStream, stream: str, min_last_seq: int | None, timeout: float | None = None
) -> StreamInfo:
    """What the leader says of a stream, once it has :func:`reached` ``min_last_seq``."""
    if min_last_seq is None:
        return await jetstream.stream_info(stream)
    return await reached(jetstream, stream, min_last_seq, timeout)


async def leader_message(
    jetstream: JetStream,
    stream: str,
    *,
    min_last_seq: int | None = None,
    timeout: float | None = None,
    **wanted: Any,
) -> StoredMessage | None:
    """The leader's message (``STREAM.MSG.GET``), read once it has reached ``min_last_seq``.

    Args:
        timeout: seconds, as for :func:`reached`.
        wanted: what to read, as for :meth:`JetStream.message`.

    Raises:
        MinLastSequenceError: the leader is not there in time (412, 10180).
        and what :meth:`JetStream.message` raises.
    """
    if min_last_seq is None:
        return await jetstream.message(stream, **wanted)
    await reached(jetstream, stream, min_last_seq, timeout)
    if await honours_min_last_seq(jetstream, stream):
        try:
            return await jetstream.message(stream, min_last_seq=min_last_seq, **wanted)
        except ApiError as error:
            if error.err_code == MinLastSequenceError.err_code:
                raise MinLastSequenceError(f"{error}: an old leader answered") from error
            if error.err_code != _UNKNOWN_FIELD:
                raise
            # The stream is led by another, older server than the one that was probed.
    return await jetstream.message(stream, **wanted)


async def honours_min_last_seq(jetstream: JetStream, stream: str) -> bool:
    """Whether the stream's leader knows ``min_last_seq``: it answers an impossible one with 412.

    Asked once for each connection and each time it was made anew. No answer counts as no.
    """
    connection = jetstream.connection
    known = _honoured.get(connection)
    if known is not None and known[0] == connection.reconnects:
        return known[1]
    try:
        await jetstream.message(stream, seq=1, min_last_seq=_IMPOSSIBLE)
        outcome = False
    except ApiError as error:
        if passes(error):
            return False  # no leader for the moment: ask again next time
        outcome = error.err_code == MinLastSequenceError.err_code
    except RequestTimeoutError:
        outcome = False
    _honoured[connection] = (connection.reconnects, outcome)
    return outcome
