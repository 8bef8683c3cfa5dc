"""``peek``: shows the first or last rows of a bucket or stream.

A bucket's rows are its stored revisions in order. To find the last rows the command reads ranges of
growing length before the last sequence: the number of sequences that contain the rows is not known
in advance.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections import deque
from typing import Any

from nats_stream_source.cli import local_reader
from nats_stream_source.cli.output import format_cell, format_table, json_column, print_json
from nats_stream_source.spark.formats.base import FormatAdapter

_GROWTH = 8
_MIN_LENGTH = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``peek``."""
    parser.add_argument("-n", "--rows", type=_count, default=10, help="number of rows; default: 10")
    parser.add_argument("--last", action="store_true", help="the last rows, not the first")
    parser.add_argument(
        "--width",
        type=_count,
        default=60,
        help="maximum width of a value in characters; default: 60",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per row, with whole values"
    )
    local_reader.add_source(parser)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Print the rows; returns 0, also without rows."""
    query = local_reader.query_from_flags(arguments)
    rows = asyncio.run(_rows(query, arguments.rows, arguments.last))
    if arguments.json:
        for row in rows:
            print_json({key: v for name in row for key, v in json_column(name, row[name]).items()})
    elif rows:
        names = local_reader.shown_columns(rows[0])
        cells = [[format_cell(row[name], arguments.width) for name in names] for row in rows]
        print(format_table(names, cells, right=("revision", "sequence")))
    else:
        print("no rows")
    return 0


async def _rows(query: FormatAdapter, count: int, last: bool) -> list[dict[str, Any]]:
    async with local_reader.open_range(query) as source:
        if not last:
            return await _first(source, source.first - 1, count)
        length = max(_MIN_LENGTH, count)
        while True:
            start = max(source.first - 1, source.last - length)
            rows: deque[dict[str, Any]] = deque(maxlen=count)
            async for batch, _ in source.rows(start, source.last):
                rows.extend(batch.slice(max(0, batch.num_rows - count)).to_pylist())
            if len(rows) == count or start < source.first:
                return list(rows)
            length *= _GROWTH


async def _first(source: local_reader.StreamRange, start: int, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    async with contextlib.aclosing(source.rows(start, source.last)) as batches:  # type: ignore[type-var]
        async for batch, _ in batches:
            rows += batch.slice(0, count - len(rows)).to_pylist()
            if len(rows) == count:
                break
    return rows
