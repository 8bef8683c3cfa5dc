"""``rebuilds``: how often ordered consumers were rebuilt, and why, by the executors' logs."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator

from nats_stream_source.cli.screen import print_json, table
from nats_stream_source.rebuilds import rebuilds_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``rebuilds``."""
    parser.add_argument(
        "log",
        nargs="+",
        help="executors' standard error, of any number of them; - for standard input",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the counts; 0."""
    found = rebuilds_in(itertools.chain.from_iterable(map(_lines, arguments.log)))
    if arguments.json:
        print_json(found)
    elif not found:
        print("no consumer was rebuilt")
    else:
        rows = [
            [stream, reason, f"{count:,}"]
            for stream, reasons in sorted(found.items())
            for reason, count in reasons.most_common()
        ]
        print(table(("stream", "reason", "count"), rows, right=("count",)))
    return 0


def _lines(log: str) -> Iterator[str]:
    if log == "-":
        yield from sys.stdin
        return
    with open(log, errors="replace") as file:
        yield from file
