"""``inspect``: shows a query's checkpoint, and compares it with the live streams.

The planner makes the comparison, as if the query were started now. So the command reports the same
problems as a start (a stream that was re-created, rolled back, or lacks unread messages), and the
same lag as the query.

The comparison requires a connection flag, a variable or a context: the default server may be
another one than that of the query.

A checkpoint does not contain the query's options. The command treats a stream ``KV_<bucket>`` as a
bucket that is read without ``includeHistory``, where compaction is not a loss.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.cli.checkpoint import Checkpoint, Source, read_checkpoint
from nats_stream_source.cli.connection import connection
from nats_stream_source.cli.flags import add_connection, given
from nats_stream_source.cli.output import print_json
from nats_stream_source.connection.connection import Connection, select_frame_scanner
from nats_stream_source.errors import (
    ConfigurationError,
    DataLossError,
    NatsSourceError,
    OffsetError,
    OptionError,
)
from nats_stream_source.jetstream.reusable_connection import SharedConnection
from nats_stream_source.jetstream.subjects import bucket_of
from nats_stream_source.options import connection_settings, kv_options, parse, stream_options
from nats_stream_source.options.connection import CONNECTION
from nats_stream_source.rows.base import FormatAdapter
from nats_stream_source.rows.formats import KvFormat, StreamFormat
from nats_stream_source.rows.offsets import Position, lag_between, range_between
from nats_stream_source.spark.planning.query_planner import QueryPlanner


@dataclass(frozen=True, slots=True)
class LiveState:
    """The live stream of a source, compared with the checkpoint.

    Attributes:
        problem: the error with which the query would fail; None if it can resume.
        first_seq, last_seq: the sequences of the stream, if it exists.
        lag: number of rows that the query has not committed yet.
        lag_seconds: the time between the message at the committed offset and the newest one.
        lag_bytes: the size of the rows of the lag, estimated by the mean of the stream's messages.
    """

    problem: str | None = None
    first_seq: int | None = None
    last_seq: int | None = None
    lag: int | None = None
    lag_seconds: float | None = None
    lag_bytes: int | None = None


Compared = Sequence[tuple[Source, LiveState]]
"""Each source with its stream; the state is empty without a comparison."""

_PARALLEL = 32  # streams that are compared at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``inspect``."""
    parser.usage = (
        "%(prog)s CHECKPOINT [--max-lag ROWS | --offline]\n"
        "                                  [--json | --prometheus] [options]"
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a query's checkpointLocation, on this machine"
    )
    comparison = parser.add_mutually_exclusive_group()
    comparison.add_argument(
        "--max-lag",
        type=int,
        metavar="ROWS",
        help="exit with status 1 if the lag of a source exceeds this number of rows",
    )
    comparison.add_argument(
        "--offline",
        action="store_true",
        help="do not compare the checkpoint with the streams, even if a server is configured",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="one JSON object instead of text")
    output.add_argument(
        "--prometheus", action="store_true", help="the lag as metrics for Prometheus, as text"
    )
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns 1 if a source cannot resume or exceeds ``--max-lag``, else 0."""
    options: dict[str, str] = {}
    if not arguments.offline:
        options = connection(arguments, default_server=bool(given(arguments, CONNECTION)))
    needs_server = "--max-lag" if arguments.max_lag is not None else None
    needs_server = "--prometheus" if arguments.prometheus else needs_server
    if needs_server and not options.get("servers"):
        raise OptionError(
            f"{needs_server} requires a server, named by --servers, NATS_URL or a context: the lag "
            f"is the distance to the live stream"
        )
    checkpoint = read_checkpoint(arguments.checkpoint)
    compared: Compared = [(source, LiveState()) for source in checkpoint.sources]
    if options.get("servers"):
        compared = asyncio.run(_compare(checkpoint, options))
    if arguments.json:
        print_json(_as_json(checkpoint, compared))
    elif arguments.prometheus:
        _print_metrics(checkpoint, compared)
    else:
        _print(checkpoint, compared)
        if not options.get("servers") and any(source.stream for source in checkpoint.sources):
            print("not compared with the streams: name a server with --servers or --context")
    max_lag = sys.maxsize if arguments.max_lag is None else arguments.max_lag
    return int(
        any(
            source.problem or live.problem or (live.lag or 0) > max_lag for source, live in compared
        )
    )


# -- the live streams ---------------------------------------------------------------------------


async def _compare(checkpoint: Checkpoint, options: Mapping[str, str]) -> Compared:
    settings = connection_settings(parse(options, CONNECTION))
    async with await Connection.open(settings, retry=False) as connection:
        shared = SharedConnection(connection)
        states = await gather_limited(
            lambda source: _live(shared, source, options), checkpoint.sources, _PARALLEL
        )
    return list(zip(checkpoint.sources, states, strict=True))


async def _live(
    connection: SharedConnection, source: Source, options: Mapping[str, str]
) -> LiveState:
    if source.stream is None:
        return LiveState()
    at, query = _position(source), _query(source, options)
    planner = QueryPlanner(query, connection)
    try:
        info = await query.stream_info(await connection.jetstream(), source.stream)
    except NatsSourceError as error:
        if error.code != 404 and not isinstance(error, ConfigurationError):
            raise
        return LiveState(str(error))
    live = LiveState(None, info.first_seq, info.last_seq)
    try:
        if source.planned is not None:
            await planner.tasks(source.offset(at), source.offset(source.planned))
        # A micro-batch may end before the last sequence, after a bucket's initial values.
        end = await planner.latest_offset(source.offset(at))
        end = planner.report_latest_offset() or end
    except (ConfigurationError, DataLossError, OffsetError) as error:
        return replace(live, problem=str(error))
    lag, seconds = lag_between(at, end.streams[source.stream])
    size = lag * info.nbytes // max(1, info.messages)
    return replace(live, lag=lag, lag_seconds=seconds, lag_bytes=size)


def _position(source: Source) -> Position:
    """The committed position of the source; its start position before the first commit."""
    if source.committed is not None:
        return source.committed
    assert source.planned is not None
    return source.planned.at_origin()


def _bucket(source: Source) -> str | None:
    """The bucket that the source reads, derived from the name of its stream."""
    if source.stream is None or any(one.startswith("$KV.") for one in source.filter):
        return None
    bucket = bucket_of(source.stream)
    return None if bucket == source.stream else bucket


def _query(source: Source, options: Mapping[str, str]) -> FormatAdapter:
    assert source.stream is not None
    filters = ",".join(source.filter)
    if (bucket := _bucket(source)) is not None:
        keys = {"keys": filters} if filters else {}
        return KvFormat(kv_options({**options, "bucket": bucket, **keys}))
    subjects = {"filterSubjects": filters} if filters else {}
    return StreamFormat(stream_options({**options, "stream": source.stream, **subjects}))


# -- the report ---------------------------------------------------------------------------------


def _as_json(checkpoint: Checkpoint, compared: Compared) -> dict[str, Any]:
    return {
        "checkpoint": str(checkpoint.path),
        "query": checkpoint.query_id,
        "committed_batch": checkpoint.committed,
        "planned_batch": checkpoint.planned,
        "frame_scanner": select_frame_scanner(),
        "sources": [_source_json(source, live) for source, live in compared],
    }


def _source_json(source: Source, live: LiveState) -> dict[str, Any]:
    committed, planned = source.committed, source.planned
    return {
        "source": source.name,
        "stream": source.stream,
        "bucket": _bucket(source),
        "committed": source.offset(committed).to_json() if committed else None,
        "planned": source.offset(planned).to_json() if planned else None,
        "problem": source.problem or live.problem,
        "other": source.other,
        "first_seq": live.first_seq,
        "last_seq": live.last_seq,
        "lag": live.lag,
        "lag_seconds": live.lag_seconds,
    }


def _print_metrics(checkpoint: Checkpoint, compared: Compared) -> None:
    # Imported here: the other reports do not require the extra.
    from nats_stream_source.metrics.recorder import Lag, Recorder
    from nats_stream_source.metrics.table import PROBLEM

    recorder, query = Recorder(), checkpoint.query_id or str(checkpoint.path)
    lags: dict[str, dict[str, Lag]] = {}
    for source, live in compared:
        if source.other is not None:
            continue
        stream, problem = source.stream or "", source.problem or live.problem
        recorder.set(PROBLEM, problem is not None, query, source.name, stream)
        lag = Lag(live.lag, live.lag_seconds, live.lag_bytes)
        lags.setdefault(source.name, {})[stream] = lag
        if problem is not None:
            print(problem, file=sys.stderr)
    for name, behind in lags.items():
        recorder.set_lags(query, name, behind)
    print(recorder.text(), end="")


def _print(checkpoint: Checkpoint, compared: Compared) -> None:
    print(f"checkpoint {checkpoint.path}")
    print(f"query      {checkpoint.query_id}")
    print(f"scanner    {select_frame_scanner()}")
    committed, planned = checkpoint.committed, checkpoint.planned
    if planned is None:
        print("nothing was planned yet: the next start begins where its options say")
    elif committed is None:
        print(f"batch {planned} is planned, none is committed: the next start reads it again")
    elif planned == committed:
        print(f"batch {committed} is committed, and none is under way")
    else:
        print(
            f"batch {committed} is committed; batch {planned} is planned and under way, or was "
            f"cut: then the next start reads it again"
        )
    for source, live in compared:
        print("", *_lines(source, live, checkpoint), sep="\n")


def _lines(source: Source, live: LiveState, checkpoint: Checkpoint) -> list[str]:
    """The report on a source."""
    if source.problem is not None:
        return [f"source {source.name}: {source.problem}"]
    if source.other is not None:
        return [f"source {source.name} is not of this package: {source.other}"]
    at = source.committed or source.planned
    if at is None:
        return [f"source {source.name} has no offset yet"]
    bucket = _bucket(source)
    word, filters = ("revision", "keys") if bucket is not None else ("sequence", "filterSubjects")
    what = f"bucket {bucket}, stream" if bucket is not None else "stream"
    lines = [
        f"source {source.name}: {what} {source.stream}, made {at.created}",
        f"  began     after {word} {at.origin:,}; initial values up to {at.initial_through:,}",
    ]
    if source.filter:
        lines.append(f"  filter    {filters}={','.join(source.filter)}")
    if at.epoch:
        lines.append(
            f"  epoch     {at.epoch}: number of times the stream was replaced or rolled back"
        )
    if (done := source.committed) is not None:
        when = f", written {done.time}" if done.time else ""
        lines.append(
            f"  committed up to {word} {done.stream_seq:,}{when}; "
            f"{done.consumer_seq:,} rows delivered by then"
        )
    if (ahead := source.planned) is not None:
        try:
            start, end = range_between(_position(source), ahead)
        except OffsetError as error:
            return [*lines, f"  planned   {error}"]
        lines.append(
            f"  planned   batch {checkpoint.planned}: {word}s "
            + (f"{start + 1:,} to {end:,}" if end > start else "none")
        )
    if live.last_seq is not None:
        lines.append(f"  today     {live.first_seq:,} to {live.last_seq:,}")
    if live.problem is not None:
        return [*lines, f"  differs   {live.problem}"]
    if live.lag is not None:
        behind = "" if live.lag_seconds is None else f", {live.lag_seconds:,.3f} s"
        lines.append(f"  lag       {live.lag:,} rows{behind}")
    return lines
