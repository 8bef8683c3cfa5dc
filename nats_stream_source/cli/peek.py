"""``peek``: shows the first or last rows of a bucket or stream, and follows it.

A bucket's rows are its stored revisions in order. To find the last rows the command reads ranges of
growing length before the last sequence: the number of sequences that contain the rows is not known
in advance.

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
from collections.abc import Sequence
from typing import Any

from nats_stream_source.cli import local_reader
from nats_stream_source.cli.flags import count
from nats_stream_source.cli.output import (
    Table,
    closed_pipe,
    format_cell,
    json_column,
    print_json,
    terminal_columns,
    text_width,
)
from nats_stream_source.errors import OptionError
from nats_stream_source.rows.base import FormatAdapter

_GROWTH = 8
_MIN_LENGTH = 256
_ROWS = 10
_WIDTH = 60
_MIN_WIDTH = 10
_TERMINATED = 128 + signal.SIGTERM
_RIGHT = ("revision", "sequence")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``peek``."""
    parser.usage = (
        "%(prog)s BUCKET | --stream NAME | --subject SUBJECT\n"
        "                               [-n ROWS] [--last | -f] [--json] [options]"
    )
    parser.add_argument("name", nargs="?", metavar="BUCKET", help="short for --bucket BUCKET")
    parser.add_argument(
        "-n", "--rows", type=count, metavar="ROWS", help=f"number of rows; default: {_ROWS}"
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
        type=count,
        metavar="N",
        help=f"maximum width of a key or value in characters; default: {_WIDTH}, on a terminal "
        f"what fits a line",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per row, with whole values"
    )
    local_reader.add_source(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the rows; returns 0, also without rows."""
    if arguments.name is not None:
        if arguments.bucket is not None:
            raise OptionError("the bucket is named twice: leave out --bucket")
        arguments.bucket = arguments.name
    query = local_reader.query_from_flags(arguments)
    output = _Output(arguments)
    if arguments.follow:
        try:
            asyncio.run(_follow(query, arguments, output))
        except asyncio.CancelledError:
            return _TERMINATED
        return 0
    rows = asyncio.run(_rows(query, arguments.rows or _ROWS, arguments.last))
    output.write(rows)
    if not rows and not arguments.json:
        print("no rows", file=sys.stderr)
    return 0


class _Output:
    """Prints rows as JSON or as a table, whose columns keep their width."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._json: bool = arguments.json
        self._width: int | None = arguments.width
        self._table: Table | None = None

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        if self._json:
            for row in rows:
                print_json({k: v for name in row for k, v in json_column(name, row[name]).items()})
        elif rows:
            names = local_reader.shown_columns(rows[0])
            width = self._width or _fitting_width(names, rows)
            self._width = width  # of later rows too
            if self._table is None:
                self._table = Table(names, _RIGHT)
            cells = [[format_cell(row[name], width) for name in names] for row in rows]
            print(self._table.format(cells))
        sys.stdout.flush()


def _fitting_width(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> int:
    """The width of a key and a value with which the rows fit the lines of a terminal."""
    if (columns := terminal_columns()) is None:
        return _WIDTH
    columns -= 2 * (len(names) - 1)
    free: list[int] = []
    for name in names:
        cells = [format_cell(row[name], _WIDTH) for row in rows]
        width = max(text_width(text) for text in (name, *cells))
        if name in ("key", "subject", "value", "data"):
            free.append(width)
        else:
            columns -= width
    # The shorter one of the two columns leaves its rest to the other.
    shorter = min(min(free), columns // 2)
    return min(_WIDTH, max(_MIN_WIDTH, columns - shorter))


async def _rows(query: FormatAdapter, count: int, last: bool) -> list[dict[str, Any]]:
    async with local_reader.open_range(query) as source:
        if last:
            return await _last(source, count)
        return await _first(source, source.first - 1, count)


async def _follow(query: FormatAdapter, arguments: argparse.Namespace, output: _Output) -> None:
    task = asyncio.current_task()
    assert task is not None
    # As after Ctrl-C, the consumer is deleted. (Windows has no such signal handlers.)
    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with local_reader.open_range(query) as source, closed_pipe():
        if arguments.rows is None and query.options.start_position.sequence is not None:
            position = source.first - 1
        else:
            output.write(await _last(source, arguments.rows or _ROWS))
            position = source.last
        async with contextlib.aclosing(source.follow(position)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                output.write(batch.to_pylist())


async def _first(source: local_reader.StreamRange, start: int, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    async with contextlib.aclosing(source.rows(start, source.last)) as batches:  # type: ignore[type-var]
        async for batch in batches:
            rows += batch.slice(0, count - len(rows)).to_pylist()
            if len(rows) == count:
                break
    return rows


async def _last(source: local_reader.StreamRange, count: int) -> list[dict[str, Any]]:
    length = max(_MIN_LENGTH, count)
    while True:
        start = max(source.first - 1, source.last - length)
        rows: deque[dict[str, Any]] = deque(maxlen=count)
        async for batch in source.rows(start, source.last):
            rows.extend(batch.slice(max(0, batch.num_rows - count)).to_pylist())
        if len(rows) == count or start < source.first:
            return list(rows)
        length *= _GROWTH
