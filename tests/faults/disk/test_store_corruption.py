"""A store that was damaged while its server was down: no row is wrong, in disorder or repeated.

The server drops the messages that it cannot read, so acknowledged writes are lost, and often
nothing reports that. Where the checkpoint shows the loss, the query stops. Otherwise the remaining
messages are read in order, and so are later writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nats_stream_source.embedded import NatsServer
from nats_stream_source.errors import BucketNotFoundError, DataLossError, StreamNotFoundError
from tests.support.nats.store_files import directory_of, flip
from tests.support.recorded_stream import KINDS, SEQUENCE_TERMS, RecordedStream

COUNT, SIZE = 1500, 10_000

pytestmark = pytest.mark.recorded(kinds=KINDS, count=COUNT, size=SIZE, server="nats_server")

MORE = 100


def damage(server: NatsServer, recorded: RecordedStream, work: Callable[[Path], object]) -> None:
    """Kill the server, give its directory of the stream to ``work``, and start it again."""
    server.kill()
    work(directory_of(server, recorded.stream))
    server.start()


def last_block(directory: Path) -> Path:
    return max(directory.glob("msgs/*.blk"), key=lambda file: int(file.stem))


def test_store_loses_read_messages_at_end(
    nats_server: NatsServer, recorded: RecordedStream
) -> None:
    with recorded.query() as first:
        first.until(recorded.last)
    damage(nats_server, recorded, lambda directory: flip(last_block(directory), 0.5))
    left = recorded.state()["last_seq"]
    assert 0 < left < COUNT
    lost = pytest.raises(
        DataLossError, match=f"was rolled back: last {SEQUENCE_TERMS[recorded.kind]} is {left},"
    )
    with recorded.query(offsets=first.offsets) as refused, lost:
        refused.plan()
    recorded.remove_after(left)
    recorded.write(MORE)
    with recorded.query(offsets=first.offsets, failOnDataLoss="false") as second:
        second.drain()
    assert second.seq == recorded.last
    recorded.check(second.rows, after=left)


def test_store_loses_unread_messages(nats_server: NatsServer, recorded: RecordedStream) -> None:
    """In the middle: as if it had been deleted, and so it is in no message of the server."""
    damage(nats_server, recorded, lambda directory: flip(directory / "msgs" / "1.blk", 0.5))
    state = recorded.state()
    assert (state["first_seq"], state["last_seq"]) == (1, COUNT)
    assert state["messages"] < COUNT
    recorded.write(MORE)
    with recorded.query(minPartitions="4") as query:
        query.until(recorded.last)
    read = {row.seq for row in query.rows}
    recorded.check(query.rows, lost=set(recorded.acknowledged) - read)
    assert len(read) == state["messages"] + MORE
    assert set(range(COUNT + 1, COUNT + MORE + 1)) <= read


def test_store_loses_whole_stream(nats_server: NatsServer, recorded: RecordedStream) -> None:
    """The server does not have a stream whose description it cannot read, until it is created.

    It then finds the messages, which are intact: the stream counts as restored.
    """
    gone = (StreamNotFoundError, BucketNotFoundError)
    with recorded.query() as first:
        first.until(recorded.last)
        recorded.write(MORE)
        assert first.plan()
        damage(nats_server, recorded, lambda directory: flip(directory / "meta.inf", 0.5))
        with pytest.raises(gone):
            first.read()
        with pytest.raises(gone):
            first.plan()
    with recorded.query(offsets=first.offsets, failOnDataLoss="false") as second:
        with pytest.raises(gone):
            second.plan()
        recorded.create()
        recorded.write(MORE)
        second.drain()
    assert second.offsets[-1]["epoch"] == 0
    recorded.check(second.rows, after=COUNT)
    assert len(second.rows) == 2 * MORE
