"""``follow``: keeps a Delta table equal to a bucket, in this process.

The command runs until SIGINT or SIGTERM, or with ``--once`` until the table has what the bucket
has. It prints a line about its progress every ten seconds, on a terminal every second in place.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nats_stream_source.cli.options import add_connection, connection, flag
from nats_stream_source.cli.output import terminal_columns
from nats_stream_source.delta.location import scheme_of
from nats_stream_source.delta.upkeep import COMMIT_INTERVAL
from nats_stream_source.errors import OptionError, needs_extra
from nats_stream_source.options import CONNECTION, KV

if TYPE_CHECKING:
    from nats_stream_source.delta.follower.follower import Follower
    from nats_stream_source.delta.follower.metrics import FollowerMetrics

_LINE_INTERVAL = 10.0  # seconds
_TERMINAL_INTERVAL = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``follow``."""
    parser.usage = (
        "%(prog)s BUCKET TABLE [--once] [--deletes remove|mark] [--history]\n"
        "                                 [--option NAME=VALUE]... [options]"
    )
    parser.epilog = (
        "exit status: 0 stopped by SIGINT or SIGTERM, or done; 1 a failure that a restart may "
        "cure; 2 the command line, an option, the user, an entry, the bucket, the table or a "
        "package must be changed; 3 data loss"
    )
    parser.add_argument("bucket", metavar="BUCKET", help="name of the key-value bucket")
    parser.add_argument("table", metavar="TABLE", help="path or URI of the Delta table")
    parser.add_argument(
        "--once", action="store_true", help="end when the table has what the bucket has"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=VALUE",
        dest="options",
        help="an option of nats_kv, such as keys='plane.>'; repeatable",
    )
    parser.add_argument(
        "--deletes",
        choices=("remove", "mark"),
        default="remove",
        help="remove the rows of deleted keys, or mark them; default: remove",
    )
    parser.add_argument(
        "--history",
        action="store_true",
        help="one row per revision, with the times from and to which it was valid",
    )
    parser.add_argument(
        "--reconcile",
        action="store_true",
        help="first compare each row with the bucket: keys can be removed without a marker",
    )
    parser.add_argument(
        "--commit-interval",
        type=float,
        default=COMMIT_INTERVAL,
        metavar="SECONDS",
        help="shortest time between two commits; a longer one makes fewer files; default: "
        f"{COMMIT_INTERVAL:g}",
    )
    parser.add_argument(
        "--storage-option",
        action="append",
        default=[],
        type=_pair,
        metavar="NAME=VALUE",
        dest="storage_options",
        help="an option of delta-rs for a table in an object store; repeatable",
    )
    parser.add_argument(
        "--prometheus",
        metavar="[HOST:]PORT",
        help="serve metrics for Prometheus; port 9464 is usual, 0 takes a free one",
    )
    parser.add_argument(
        "--opentelemetry",
        action="store_true",
        help="report metrics to OpenTelemetry, as opentelemetry-instrument configures it",
    )
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Follow the bucket; returns 0 when the table is up to date or the command was stopped."""
    options = connection(arguments)
    set_by = {one.name.lower(): flag(one.name) for one in CONNECTION} | {"bucket": "BUCKET"}
    for name, value in arguments.options:
        if (place := set_by.get(name.lower())) is not None:
            raise OptionError(f"invalid --option {name}: {place} sets this option; set it there")
        set_by[name.lower()] = f"an earlier --option {name}"
        options[name] = value
    # Errors name an option of the format as it is given here.
    arguments.origins |= {one.name: f"--option {one.name}" for one in KV} | {"bucket": "BUCKET"}
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    with _ended_by_signals():
        _run(arguments, options)
    return 0


def _run(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    with needs_extra("follow"):
        from nats_stream_source.delta.follower.follower import Follower
    metrics = None
    if arguments.prometheus is not None or arguments.opentelemetry:
        # Imported here: the package of the extra is only required for metrics.
        from nats_stream_source.delta.follower.metrics import FollowerMetrics

        metrics = FollowerMetrics(arguments.prometheus, arguments.opentelemetry)
    follower = Follower(
        arguments.bucket,
        # A name without a slash is a directory here.
        arguments.table if scheme_of(arguments.table) else Path(arguments.table),
        deletes=arguments.deletes,
        history=arguments.history,
        storage_options=dict(arguments.storage_options) or None,
        commit_interval=arguments.commit_interval,
        reconcile=arguments.reconcile,
        on_merge=None if metrics is None else metrics.merged,
        **options,
    )
    asyncio.run(_follow(follower, metrics, once=arguments.once))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End with status 0 by a signal, as later by the event loop: the imports take a second."""
    before = {number: signal.signal(number, lambda *_: sys.exit(0)) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


async def _follow(follower: Follower, metrics: FollowerMetrics | None, *, once: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        # Windows has no such signal handlers: Ctrl-C then cancels the task.
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, follower.stop)
    if metrics is not None:
        metrics.start(follower)
    reporting = asyncio.ensure_future(_report(follower))
    failed = True
    try:
        await follower.run(once=once)
        failed = False
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        if metrics is not None:
            metrics.end(failed=failed)
    _write(f"{follower.progress.rows:,} rows read, {_state(follower)}", "\n")


async def _report(follower: Follower) -> None:
    """Print from time to time the rate since the last line, the lag, and the keys of the table."""
    rows, since = 0, time.monotonic()
    terminal = terminal_columns() is not None
    while True:
        await asyncio.sleep(_TERMINAL_INTERVAL if terminal else _LINE_INTERVAL)
        progress, now = follower.progress, time.monotonic()
        if progress.behind is None:
            continue
        rate = (progress.rows - rows) / (now - since)
        rows, since = progress.rows, now
        _write(f"{rate:,.0f} rows/s, {_state(follower)}", "" if terminal else "\n")


def _state(follower: Follower) -> str:
    progress, behind = follower.progress, "up to date"
    if not progress.caught_up:
        rows = "?" if progress.behind is None else f"{progress.behind:,}"
        behind = f"{rows} rows behind"
        if progress.seconds_behind is not None:
            behind += f", {progress.seconds_behind:.1f} s behind"
    return f"{behind}, {progress.keys:,} {'versions' if follower.history else 'keys'}"


def _write(text: str, end: str) -> None:
    print(text if terminal_columns() is None else f"\r\x1b[K{text}", end=end, flush=True)
