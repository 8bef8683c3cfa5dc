"""Reads a range of a bucket or stream as rows, without Spark, for ``peek``.

A range ends at a sequence, or it is endless (``StreamRange.follow``). The query, the
ordered consumer and the rows are the same as in a Spark task. Nothing is written, and the consumer
is deleted at the end.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pyarrow as pa

from nats_stream_source.cli.connection import connection
from nats_stream_source.cli.flags import (
    COMMON_FLAGS,
    KV_FLAGS,
    STREAM_FLAGS,
    add_connection,
    add_options,
    given,
)
from nats_stream_source.connection.connection import Connection
from nats_stream_source.errors import OptionError, StreamNotFoundError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_identity import KnownStream
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.options import kv_options, stream_options
from nats_stream_source.rows.base import FormatAdapter
from nats_stream_source.rows.endless import EndlessRead
from nats_stream_source.rows.kv import KvFormat
from nats_stream_source.rows.splits import Split
from nats_stream_source.rows.stream import StreamFormat


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the bucket or stream, and for the connection."""
    group = parser.add_argument_group(
        "what to read", "A bucket with --bucket, or a stream with --stream or --subject."
    )
    add_options(group, KV_FLAGS + STREAM_FLAGS + COMMON_FLAGS)
    add_connection(parser)


def query_from_flags(arguments: argparse.Namespace) -> FormatAdapter:
    """The query that the flags describe; raises OptionError if they do not describe one."""
    kv, stream = given(arguments, KV_FLAGS), given(arguments, STREAM_FLAGS)
    if kv and stream:
        raise OptionError("--bucket and --keys are for a bucket, the others for a stream; name one")
    options = {**connection(arguments), **given(arguments, COMMON_FLAGS)}
    if stream:
        return StreamFormat(stream_options({**options, **stream}))
    if not kv:
        raise OptionError("--bucket or --stream is missing: name the bucket or stream to read")
    return KvFormat(kv_options({**options, **kv}))


class StreamRange:
    """The present messages of a bucket or stream.

    Attributes:
        info: the stream info from the leader.
        first: the first sequence of the stream, or ``--start-sequence`` if that is higher.
        last: the last sequence.
    """

    def __init__(
        self, adapter: FormatAdapter, connection: SharedConnection, info: StreamInfo
    ) -> None:
        self.info = info
        self.first = max(info.first_seq, adapter.options.start_position.sequence or 1, 1)
        self.last = info.last_seq
        self._adapter = adapter
        self._connection = connection

    async def rows(self, start: int, end: int) -> AsyncIterator[pa.RecordBatch]:
        """The rows of ``(start, end]`` in order."""
        if start >= end:
            return
        split = self._split(start, end)
        reader = OrderedReader(self._connection, split.range)
        # Also deletes the consumer if the caller stops early.
        async with contextlib.aclosing(reader.batches()) as batches:
            async for frames in batches:
                if len(frames):
                    yield self._adapter.record_batch(frames, split)

    async def follow(self, start: int) -> AsyncIterator[pa.RecordBatch]:
        """The rows after ``start``, as they arrive, until the caller stops."""
        # As a watch: on any replica, since a consumer that runs on outlives its stream's leader.
        read = EndlessRead(self._adapter, self._connection, self.info, start)
        try:
            async with contextlib.aclosing(read.batches()) as batches:
                async for arrived in batches:
                    yield arrived.rows
        except StreamNotFoundError:
            raise StreamNotFoundError(
                f"could not follow stream {self.info.name!r}: it was deleted"
            ) from None

    def _split(self, start: int, end: int) -> Split:
        scope = self._adapter.read_scope(self.info)
        known = KnownStream.of(self.info)
        request = self._adapter.range_request(scope, self.info.name, known, start, end)
        return Split(request, scope.prefix, initial_through=0)


@contextlib.asynccontextmanager
async def open_range(adapter: FormatAdapter) -> AsyncIterator[StreamRange]:
    """Open the query's range, on its own connection."""
    async with await Connection.open(adapter.options.connection, retry=False) as connection:
        try:
            jetstream = JetStream(connection)
            stream = await adapter.stream_name(jetstream)
            info = await adapter.stream_info(jetstream, stream)
            info = await adapter.completed(jetstream, info)
            await adapter.verify_filters(jetstream, info)
            yield StreamRange(adapter, SharedConnection(connection), info)
        finally:
            adapter.finish()


def shown_columns(row: Mapping[str, Any]) -> list[str]:
    """The columns that differ between the rows of a stream."""
    # `initial` and `delta` belong to a query; the others are the same in every row.
    return [
        name
        for name in row
        if name not in ("initial", "delta", "stream_created", "bucket", "stream")
    ]
