"""A range of a bucket or stream as rows, without Spark: what ``peek`` and ``bench`` have in common.

The same query, ordered consumer and rows as in a Spark task. Nothing is written, and the consumer
is deleted at the end.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pyarrow as pa

from nats_stream_source.cli.connection import add_connection, add_options, connection, given
from nats_stream_source.errors import OptionError
from nats_stream_source.jetstream.api import JetStream, StreamInfo
from nats_stream_source.jetstream.connection import Connection
from nats_stream_source.jetstream.link import SharedLink
from nats_stream_source.jetstream.ordered import OrderedReader
from nats_stream_source.options import KV, STREAM, Option, kv_options, stream_options
from nats_stream_source.source.plan import Plan
from nats_stream_source.source.query import Query, query_of
from nats_stream_source.source.reader import request_of


def _some(table: tuple[Option, ...], *names: str) -> tuple[Option, ...]:
    return tuple(option for option in table if option.name in names)


_OF_KV = _some(KV, "bucket", "keys")
_OF_STREAM = _some(STREAM, "stream", "subject", "filterSubjects")
_OF_BOTH = _some(STREAM, "startSequence")


def add_source(parser: argparse.ArgumentParser) -> None:
    """The flags that say what is read, and where it is."""
    group = parser.add_argument_group(
        "what to read", "A bucket, or a stream: the options of nats_kv and nats_stream, as flags."
    )
    add_options(group, _OF_KV + _OF_STREAM + _OF_BOTH)
    add_connection(parser)


def names_something(arguments: argparse.Namespace) -> bool:
    """Whether a flag says what is read."""
    return bool(given(arguments, _OF_KV + _OF_STREAM + _OF_BOTH))


def query(arguments: argparse.Namespace) -> Query:
    """The query that the flags describe; OptionError where they do not describe one."""
    of_kv, of_stream = given(arguments, _OF_KV), given(arguments, _OF_STREAM)
    if of_kv and of_stream:
        raise OptionError("--bucket and --keys are of a bucket, the others of a stream: name one")
    options = {**connection(arguments), **given(arguments, _OF_BOTH)}
    if of_stream:
        return query_of(stream_options({**options, **of_stream}))
    if not of_kv:
        raise OptionError("--bucket or --stream is missing: what shall be read")
    return query_of(kv_options({**options, **of_kv}))


class Range:
    """A bucket or stream as it is now.

    Attributes:
        info: its stream, as the leader describes it.
        first: the first sequence that there is, or that ``--start-sequence`` says.
        last: the last sequence.
    """

    def __init__(self, query: Query, link: SharedLink, info: StreamInfo) -> None:
        self.info = info
        self.first = max(info.first_seq, query.beginning.sequence or 1, 1)
        self.last = info.last_seq
        self._query = query
        self._link = link

    async def rows(self, start: int, end: int) -> AsyncIterator[tuple[pa.RecordBatch, int]]:
        """The rows of ``(start, end]`` in order, and how many bytes each batch came in."""
        if start >= end:
            return
        content, info = self._query.content(self.info), self.info
        plan = Plan(
            stream=info.name,
            created=info.created,
            prefix=content.prefix,
            filters=content.filters,
            start=start,
            end=end,
            initial_through=0,
        )
        reader = OrderedReader(self._link, request_of(plan, self._query))
        # Left early, its consumer is deleted all the same.
        async with contextlib.aclosing(reader.batches()) as batches:
            async for frames in batches:
                if len(frames):
                    yield self._query.rows(frames, plan), frames.nbytes


@contextlib.asynccontextmanager
async def opened(query: Query) -> AsyncIterator[Range]:
    """The range that the query is about, on a connection of its own."""
    connected = await Connection.open(query.connection)
    try:
        jetstream = JetStream(connected)
        stream = await query.stream(jetstream)
        info = await query.look(jetstream, stream)
        await query.check(jetstream, info)
        yield Range(query, SharedLink(connected), info)
    finally:
        await connected.close()


def shown_columns(row: Mapping[str, Any]) -> list[str]:
    """The columns that a range of a stream has something to say in."""
    # `initial` and `delta` are of a query; the others are the same in every row.
    return [
        name
        for name in row
        if name not in ("initial", "delta", "stream_created", "bucket", "stream")
    ]
