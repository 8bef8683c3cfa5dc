"""``peek``: the first or last rows of a bucket or stream.

A bucket's rows are its revisions as they are stored, in their order. The last rows are found by
reading backwards in stretches that grow, each forwards: how many sequences hold so many rows, only
reading tells.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections import deque
from typing import Any

from nats_stream_source.cli import reading
from nats_stream_source.cli.screen import jsonable, print_json, readable, table
from nats_stream_source.source.query import Query

_WIDEN = 8
_LEAST = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``peek``."""
    parser.add_argument("-n", "--rows", type=_count, default=10, help="how many rows; default: 10")
    parser.add_argument("--last", action="store_true", help="the last rows, not the first")
    parser.add_argument(
        "--width", type=_count, default=60, help="cut values at so many characters; default: 60"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a row, values whole")
    reading.add_source(parser)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Print the rows; 0 also where there are none."""
    query = reading.query(arguments)
    rows = asyncio.run(_rows(query, arguments.rows, arguments.last))
    if arguments.json:
        for row in rows:
            print_json({key: v for name in row for key, v in jsonable(name, row[name]).items()})
    elif rows:
        names = reading.shown_columns(rows[0])
        cells = [[readable(row[name], arguments.width) for name in names] for row in rows]
        print(table(names, cells, right=("revision", "sequence")))
    else:
        print("no rows")
    return 0


async def _rows(query: Query, count: int, last: bool) -> list[dict[str, Any]]:
    async with reading.opened(query) as found:
        if not last:
            return await _first(found, found.first - 1, count)
        stretch = max(_LEAST, count)
        while True:
            start = max(found.first - 1, found.last - stretch)
            rows: deque[dict[str, Any]] = deque(maxlen=count)
            async for batch, _ in found.rows(start, found.last):
                rows.extend(batch.slice(max(0, batch.num_rows - count)).to_pylist())
            if len(rows) == count or start < found.first:
                return list(rows)
            stretch *= _WIDEN


async def _first(found: reading.Range, start: int, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    async with contextlib.aclosing(found.rows(start, found.last)) as batches:  # type: ignore[type-var]
        async for batch, _ in batches:
            rows += batch.slice(0, count - len(rows)).to_pylist()
            if len(rows) == count:
                break
    return rows
