"""A stream with holes between entries, and a partial mirror that responds to its Direct Gets.

Such a mirror responds to Direct Gets as the stream would, from a part of its messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from nats.aio.client import Client

from tests.support.nats.buckets import api, publish, with_client
from tests.support.proxy.fault_proxy import Proxy
from tests.support.recorded_stream import RecordedStream, Row
from tests.support.wait import wait_until


def answered_by(url: str, stream: str, subject: str) -> str | None:
    """``Nats-Stream`` of a Direct Get for the last message of ``subject``; None for a 404."""

    async def work(client: Client) -> str | None:
        request = json.dumps({"last_by_subj": subject}).encode()
        message = await client.request(f"$JS.API.DIRECT.GET.{stream}", request, timeout=5)
        return (message.headers or {}).get("Nats-Stream")

    return with_client(url, work)


ENTRIES = 1000
"""Written with as many holes between them, see :func:`write_with_holes`."""
JUNK = "junk.x"
PARTS = {"a tenth": 2 * ENTRIES - 199, "the last, which matches no filter": 2 * ENTRIES}
"""From which sequence on a partial mirror has the stream."""


def write_with_holes(recorded: RecordedStream) -> int:
    """Write :data:`ENTRIES`, and after each the same key again; the sequence of its last message.

    Without holes sequences count rows, and no rank is requested.
    """
    written = recorded.messages(ENTRIES)
    both = [pair for entry in written for pair in (entry, (JUNK, b"junk"))]
    sequences = publish(recorded.url, [(recorded.prefix + key, value, None) for key, value in both])
    recorded.acknowledged.update(zip(sequences[::2], written, strict=True))
    recorded.acknowledged[sequences[-1]] = both[-1]
    state = recorded.state()
    assert (state["messages"], state["last_seq"]) == (ENTRIES + 1, sequences[-1])
    return sequences[-1]


def answers_with_a_part(recorded: RecordedStream, first: int) -> None:
    """From now on only a mirror that begins at ``first`` responds to Direct Gets of the stream.

    Together with the stream it responds to one in two, and a test may see none of those.
    """
    part = {
        "name": f"{recorded.name}-part",
        "mirror": {"name": recorded.stream, "opt_start_seq": first},
        "mirror_direct": True,
        "allow_direct": True,
    }
    api(recorded.url, f"STREAM.CREATE.{part['name']}", part)
    # It joins in when it has caught up.
    subject = f"{recorded.prefix}k0"
    wait_until(
        lambda: answered_by(recorded.url, recorded.stream, subject) is None,
        "it answers",
        deadline=120,
    )
    config = api(recorded.url, f"STREAM.INFO.{recorded.stream}")["config"]
    api(recorded.url, f"STREAM.UPDATE.{recorded.stream}", {**config, "allow_direct": False})
    last = f"{recorded.prefix}{JUNK}"
    assert {answered_by(recorded.url, recorded.stream, last) for _ in range(10)} == {part["name"]}


def asked_a_mirror(proxy: Proxy) -> bool:
    """Whether Direct Gets requested ranks, each with a response of a mirror or a 404."""
    asked = len(proxy.asked("$JS.API.DIRECT.GET."))
    answers = [frame for frame in proxy.seen if b"-part\r\n" in frame or b"NATS/1.0 404" in frame]
    return 0 < asked <= len(answers)


def check_balance(splits: Sequence[tuple[int, int]], rows: Sequence[Row]) -> None:
    """Four splits are balanced within a factor of 2."""
    sizes = [sum(start < row.seq <= end for row in rows) for start, end in splits]
    assert len(sizes) == 4
    assert sum(sizes) == len(rows)
    assert max(sizes) <= 2 * min(sizes), sizes
