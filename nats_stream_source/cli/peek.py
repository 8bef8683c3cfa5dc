"""``peek``: shows the first or last rows of a bucket or stream, and follows it.

The query, the ordered consumer and the rows are the same as in a Spark task. Nothing is written,
and the consumer is deleted at the end. A bucket's rows are its stored revisions in order. To find
the last rows the command reads ranges of growing length before the last sequence: the number of
sequences that contain the rows is not known in advance.

With ``--follow`` the command prints the last rows, and then each new row when it arrives, until
Ctrl-C, SIGTERM (exit status 143), or until the reader of its output closes the pipe. Each row is
written at once, also to a pipe.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from nats_stream_source.cli.options import (
    KV_FLAGS,
    STREAM_FLAGS,
    add_connection,
    add_options,
    connection,
    given,
)
from nats_stream_source.cli.output import (
    closed_pipe,
    format_cell,
    json_column,
    print_json,
    terminal_columns,
    text_width,
)
from nats_stream_source.connection.connection import Connection
from nats_stream_source.errors import OptionError, StreamNotFoundError
from nats_stream_source.jetstream.api import JetStream
from nats_stream_source.jetstream.ordered.reader import OrderedReader
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.stream_info import StreamInfo
from nats_stream_source.options import kv_options, stream_options
from nats_stream_source.rows.base import FormatAdapter, Split
from nats_stream_source.rows.endless import EndlessRead
from nats_stream_source.rows.formats import KvFormat, StreamFormat

_GROWTH = 8
_MIN_LENGTH = 256
_ROWS = 10
_WIDTH = 60
_MIN_WIDTH = 10
_TERMINATED = 128 + signal.SIGTERM
_RIGHT = ("revision", "sequence")
# `initial` and `delta` belong to a query; the others are the same in every row.
_HIDDEN = ("initial", "delta", "stream_created", "bucket", "stream")

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``peek``."""
    parser.usage = (
        "%(prog)s BUCKET | --stream NAME | --subject SUBJECT\n"
        "                               [-n ROWS] [--last | -f] [--json] [options]"
    )
    parser.add_argument("name", nargs="?", metavar="BUCKET", help="short for --bucket BUCKET")
    parser.add_argument(
        "-n", "--rows", type=_count, metavar="ROWS", help=f"number of rows; default: {_ROWS}"
    )
    parser.add_argument("--last", action="store_true", help="the last rows, not the first")
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="the last rows (with --start-sequence: all from there), then each new row, until "
        "Ctrl-C",
    )
    parser.add_argument(
        "--width",
        type=_count,
        metavar="N",
        help=f"maximum width of a key or value in characters; default: {_WIDTH}, on a terminal "
        f"what fits a line",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per row, with whole values"
    )
    group = parser.add_argument_group(
        "what to read", "A bucket with --bucket, or a stream with --stream or --subject."
    )
    add_options(group, KV_FLAGS + STREAM_FLAGS)
    add_connection(parser)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Print the rows; returns 0, also without rows."""
    adapter = _adapter(arguments)
    output = _Output(arguments)
    if arguments.follow:
        try:
            asyncio.run(_follow(adapter, arguments, output))
        except asyncio.CancelledError:
            return _TERMINATED
        return 0
    rows = asyncio.run(_rows(adapter, arguments.rows or _ROWS, arguments.last))
    output.write(rows)
    if not rows and not arguments.json:
        print("no rows", file=sys.stderr)
    return 0


def _adapter(arguments: argparse.Namespace) -> FormatAdapter:
    if arguments.name is not None:
        if arguments.bucket is not None:
            raise OptionError("the bucket is named twice: leave out --bucket")
        arguments.bucket = arguments.name
    kv, stream = given(arguments, KV_FLAGS), given(arguments, STREAM_FLAGS)
    # Of both formats.
    start = {name: stream.pop(name) for name in ("startSequence",) if name in stream}
    if kv and stream:
        raise OptionError("--bucket and --keys are for a bucket, the others for a stream; name one")
    options = {**connection(arguments), **start}
    if stream:
        return StreamFormat(stream_options({**options, **stream}))
    if not kv:
        raise OptionError("--bucket or --stream is missing: name the bucket or stream to read")
    return KvFormat(kv_options({**options, **kv}))


class _Output:
    """Prints rows as JSON, or as a table whose columns are as wide as their widest cell so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._json: bool = arguments.json
        self._width: int | None = arguments.width
        self._widths: dict[str, int] = {}

    def write(self, rows: Sequence[Row]) -> None:
        if self._json:
            for row in rows:
                print_json({k: v for name in row for k, v in json_column(name, row[name]).items()})
        elif rows:
            names = [name for name in rows[0] if name not in _HIDDEN]
            limit = self._width = self._width or _fitting_width(names, rows)  # of later rows too
            cells = [[format_cell(row[name], limit) for name in names] for row in rows]
            if not self._widths:
                cells.insert(0, names)
            for name, *column in zip(names, *cells, strict=True):
                widths = map(text_width, column)
                self._widths[name] = max(self._widths.get(name, 0), *widths)
            for line in cells:
                print("  ".join(map(self._padded, names, line)).rstrip())
        sys.stdout.flush()

    def _padded(self, name: str, cell: str) -> str:
        padding = " " * (self._widths[name] - text_width(cell))
        return padding + cell if name in _RIGHT else cell + padding


def _fitting_width(names: Sequence[str], rows: Sequence[Row]) -> int:
    """The width of a key and a value with which the rows fit the lines of a terminal."""
    if (columns := terminal_columns()) is None:
        return _WIDTH
    widths = {
        name: max(text_width(format_cell(one, _WIDTH)) for one in (name, *(r[name] for r in rows)))
        for name in names
    }
    free = [widths.pop(name) for name in ("key", "subject", "value", "data") if name in widths]
    columns -= 2 * (len(names) - 1) + sum(widths.values())
    # The shorter one of the two columns leaves its rest to the other.
    shorter = min(min(free), columns // 2)
    return min(_WIDTH, max(_MIN_WIDTH, columns - shorter))


@dataclass(frozen=True, slots=True)
class _Source:
    """The present messages of a bucket or stream; ``info`` is from the leader."""

    adapter: FormatAdapter
    connection: SharedConnection
    info: StreamInfo

    @property
    def before(self) -> int:
        """The sequence before the first one to show."""
        start = self.adapter.options.start_position.sequence or 1
        return max(self.info.first_seq, start) - 1

    async def batches(self, start: int) -> AsyncIterator[pa.RecordBatch]:
        """The rows of ``(start, last sequence]`` in order."""
        if start >= self.info.last_seq:
            return
        scope = self.adapter.read_scope(self.info)
        request = self.adapter.range_request(scope, self.info, start, self.info.last_seq)
        split = Split(request, initial_through=0)
        reader = OrderedReader(self.connection, request)
        # Also deletes the consumer if the caller stops early.
        async with contextlib.aclosing(reader.batches()) as batches:
            async for frames in batches:
                if len(frames):
                    yield self.adapter.record_batch(frames, split)

    async def first(self, count: int) -> list[Row]:
        """The first rows."""
        rows: list[Row] = []
        async with contextlib.aclosing(self.batches(self.before)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                rows += batch.slice(0, count - len(rows)).to_pylist()
                if len(rows) == count:
                    break
        return rows

    async def last(self, count: int) -> list[Row]:
        """The last rows."""
        length = max(_MIN_LENGTH, count)
        while True:
            start = max(self.before, self.info.last_seq - length)
            rows: deque[Row] = deque(maxlen=count)
            async for batch in self.batches(start):
                rows.extend(batch.slice(max(0, batch.num_rows - count)).to_pylist())
            if len(rows) == count or start == self.before:
                return list(rows)
            length *= _GROWTH


@contextlib.asynccontextmanager
async def _opened(adapter: FormatAdapter) -> AsyncIterator[_Source]:
    async with await Connection.open(adapter.options.connection, retry=False) as connection:
        try:
            jetstream = JetStream(connection)
            stream = await adapter.stream_name(jetstream)
            info = await adapter.stream_info(jetstream, stream)
            info = await adapter.completed(jetstream, info)
            await adapter.verify_filters(jetstream, info)
            yield _Source(adapter, SharedConnection(connection), info)
        finally:
            adapter.finish()


async def _rows(adapter: FormatAdapter, count: int, last: bool) -> list[Row]:
    async with _opened(adapter) as source:
        return await (source.last(count) if last else source.first(count))


async def _follow(adapter: FormatAdapter, arguments: argparse.Namespace, output: _Output) -> None:
    task = asyncio.current_task()
    assert task is not None
    # As after Ctrl-C, the consumer is deleted. (Windows has no such signal handlers.)
    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with _opened(adapter) as source, closed_pipe():
        if arguments.rows is None and adapter.options.start_position.sequence is not None:
            position = source.before
        else:
            output.write(await source.last(arguments.rows or _ROWS))
            position = source.info.last_seq
        # As a watch: on any replica, since a consumer that runs on outlives its stream's leader.
        read = EndlessRead(adapter, source.connection, source.info, position)
        try:
            async with contextlib.aclosing(read.batches()) as batches:
                async for messages in batches:
                    output.write(read.rows(messages).to_pylist())
        except StreamNotFoundError:
            raise StreamNotFoundError(
                f"could not follow stream {source.info.name!r}: it was deleted"
            ) from None
