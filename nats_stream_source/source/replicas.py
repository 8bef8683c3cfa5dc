"""Whether the replica that served a read has all that the stream's leader has.

A consumer is served by any server that has the stream. One whose store was damaged (a flipped bit,
a block that is gone) drops what it cannot read when it starts, says nothing and fetches nothing:
its end is the leader's, so it counts as current, and its consumers pass over what it lacks as they
pass over deleted messages. Only the leader can tell these apart. So where a read was not served by
the leader, the leader is asked for the longest holes in what came: if it has a message of the query
there, the replica has lost it.

That finds all damage in a range with few holes, and a whole block's loss in any; of a range with
more holes than are asked for, damage that is shorter than all of them passes. What the leader
itself has lost nobody can tell from what was deleted.

A replica may be ahead of the leader for a moment: it has applied a deletion that the leader has yet
to apply, or its clock lets a message expire earlier. So a message counts only if it stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from nats_stream_source.errors import DamagedReplicaError, PermissionDeniedError
from nats_stream_source.jetstream.api import JetStream, StoredMessage, StreamInfo
from nats_stream_source.jetstream.link import Link
from nats_stream_source.jetstream.patience import patiently
from nats_stream_source.jetstream.together import together
from nats_stream_source.logs import field_logger
from nats_stream_source.source.holes import Holes
from nats_stream_source.source.plan import Plan

MOST_HOLES = 16
"""Holes times filters that the leader is asked about: for each it gives a whole message."""

_PAUSE = 0.5  # seconds between two questions
_QUESTIONS = 20  # until a message that the leader has is not about to go away

log = field_logger(__name__)


async def check_replicas(
    link: Link, plan: Plan, info: StreamInfo, holes: Holes, servers: Collection[str | None]
) -> None:
    """Compare what came of a range with what the leader has.

    Args:
        info: the stream after the read.
        holes: of what came.
        servers: which ones had the consumers; None for one that did not say it.

    Raises:
        DamagedReplicaError: the leader has a message that did not come.
    """
    if not info.replicated or set(servers) == {info.leader}:
        return
    asked = holes.longest(plan.end)
    filters = plan.filters[:MOST_HOLES] or (">",)
    longest = sorted(asked, key=lambda hole: hole[0] - hole[1])
    asked = [hole for hole in longest if hole[1] >= info.first_seq][: MOST_HOLES // len(filters)]

    async def ask() -> StoredMessage | None:
        return await _first_in(await link.jetstream(), plan.stream, asked, filters)

    found: StoredMessage | None = None
    try:
        for question in range(_QUESTIONS):
            if question:
                await asyncio.sleep(_PAUSE)
            found = await patiently(ask, link.settings.connect_timeout)
            if found is None:
                return
    except PermissionDeniedError as error:
        log.info("whether replicas have all is not known", stream=plan.stream, error=error)
        return
    assert found is not None
    names = " or ".join(sorted(repr(name) for name in servers if name)) or "another server"
    raise DamagedReplicaError(
        f"the leader of stream {plan.stream}, {info.leader!r}, has a message at {found.seq} that "
        f"{names} did not deliver: that server's replica has lost messages. Have it copied anew "
        f"(nats stream cluster peer-remove {plan.stream} SERVER). A task that Spark tries again "
        f"reads at the leader: allow it more attempts (spark.task.maxFailures; a master "
        f"'local[*, 4]' where Spark runs in one process)"
    )


async def _first_in(
    jetstream: JetStream, stream: str, holes: Sequence[tuple[int, int]], filters: Sequence[str]
) -> StoredMessage | None:
    """A message that the leader has in one of the holes; None where it has none."""

    async def look(question: tuple[tuple[int, int], str]) -> StoredMessage | None:
        (first, last), subject = question
        message = await jetstream.message(stream, seq=first, next_by_subj=subject)
        return message if message is not None and message.seq <= last else None

    questions = [(hole, subject) for hole in holes for subject in filters]
    found = [message for message in await together(look, questions) if message is not None]
    return min(found, key=lambda message: message.seq, default=None)
