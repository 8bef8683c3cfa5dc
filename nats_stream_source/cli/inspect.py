"""``inspect``: shows a query's checkpoint, and compares it with the live streams.

The planner makes the comparison, as if the query were started now. So the command reports the same
problems as a start (a stream that was re-created, rolled back, or lacks unread messages), and the
same lag as the query.

The comparison requires a connection flag, a variable or a context: the default server may be
another one than that of the query.

A checkpoint does not contain the query's options. The command treats a stream ``KV_<bucket>`` as a
bucket that is read without ``includeHistory``, where compaction is not a loss.

**The checkpoint** has the format of Spark's file system checkpoints. Spark writes ``offsets/N``
before it reads micro-batch N, and ``commits/N`` after the micro-batch is in the sink. A file of the
offset log consists of lines: the version of the log, Spark's own object, then one line per source
in the order of the query: the source's offset as JSON, or ``-`` without an offset. In version 2 of
the log (``spark.sql.streaming.offsetLog.formatVersion``) each of these lines starts with the
source's name and a colon, and their order has no meaning.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nats_stream_source.aio.tasks import gather_limited
from nats_stream_source.cli.options import add_connection, connection, given
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
from nats_stream_source.rows.offsets import ONE_STREAM, Offset, Position, lag, range_between
from nats_stream_source.spark.planning.query_planner import QueryPlanner


class CheckpointError(NatsSourceError):
    """A directory is not a checkpoint, or it cannot be read."""


@dataclass(frozen=True, slots=True)
class Source:
    """One source of a query, by its offsets in the log; one stream of it, if it reads several.

    Attributes:
        name: its index within the query, from 0, or the name that the query gave it.
        stream: the name of its stream; None without an offset.
        filter: the filters of the query.
        committed: end of the last committed micro-batch; None before the first.
        planned: end of the last planned micro-batch, if it is not committed.
        problem: why its offsets cannot be read (a newer version, or damage), or the error with
            which the query would fail; None if it can resume.
        other: the offset of a source of another package, shortened.
        first_seq, last_seq: the sequences of the live stream, if it exists and was compared.
        lag: number of rows that the query has not committed yet.
        lag_seconds: the time between the message at the committed offset and the newest one.
        lag_bytes: the size of the rows of the lag, estimated by the mean of the stream's messages.
    """

    name: str
    stream: str | None = None
    filter: tuple[str, ...] = ()
    committed: Position | None = None
    planned: Position | None = None
    problem: str | None = None
    other: str | None = None
    first_seq: int | None = None
    last_seq: int | None = None
    lag: int | None = None
    lag_seconds: float | None = None
    lag_bytes: int | None = None

    @property
    def position(self) -> Position:
        """The committed position; the start position before the first commit."""
        if self.committed is not None:
            return self.committed
        assert self.planned is not None
        return self.planned.at_origin()

    @property
    def bucket(self) -> str | None:
        """The bucket that the source reads, derived from the name of its stream."""
        if self.stream is None or any(one.startswith("$KV.") for one in self.filter):
            return None
        bucket = bucket_of(self.stream)
        return None if bucket == self.stream else bucket

    def offset(self, position: Position) -> Offset:
        """The offset of a query of this stream."""
        assert self.stream is not None
        return Offset({self.stream: position}, self.filter, ONE_STREAM)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        query_id: Spark's id of the query, which is the same after restarts.
        committed: the last micro-batch in the sink; None before the first.
        planned: the last planned micro-batch; None before the first.
    """

    path: Path
    query_id: str
    committed: int | None
    planned: int | None
    sources: tuple[Source, ...]


def read_checkpoint(where: str) -> Checkpoint:
    """Read the checkpoint directory ``where``, a path or a ``file:`` URI.

    Raises:
        CheckpointError: the directory is missing, not a checkpoint, or on another machine.
    """
    path = _local(where)
    if not path.is_dir():
        raise CheckpointError(f"could not read checkpoint: {path} is not a directory")
    try:
        query_id = str(json.loads((path / "metadata").read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{path} is not a checkpoint: it does not contain a query's file 'metadata'; use the "
            f"query's checkpointLocation"
        ) from None
    planned, committed = _last_number(path / "offsets"), _last_number(path / "commits")
    if planned is None:
        return Checkpoint(path, query_id, committed, None, ())
    newest = _read_log(path / "offsets" / str(planned))
    before: dict[str, str | None] = {}
    if committed is not None:
        before = newest if planned == committed else _read_log(path / "offsets" / str(committed))
    names = sorted(newest, key=lambda name: (not name.isdecimal(), name.zfill(9)))
    sources = tuple(
        source
        for name in names
        for source in _sources(
            name, before.get(name), newest[name] if planned != committed else None
        )
    )
    return Checkpoint(path, query_id, committed, planned, sources)


def _local(where: str) -> Path:
    # Spark takes the path of a file: URI literally.
    path = re.sub(r"^file:(//[^/]*)?", "", where, flags=re.IGNORECASE)
    if "://" in path:
        raise CheckpointError(
            f"could not read checkpoint: {where} is not on this machine; copy its directories "
            f"'offsets' and 'commits' and its file 'metadata', and use the copy"
        )
    return Path(path)


def _last_number(log: Path) -> int | None:
    numbers = [int(file.name) for file in log.glob("[0-9]*") if file.name.isdecimal()]
    return max(numbers, default=None)


def _read_log(file: Path) -> dict[str, str | None]:
    """The sources' offsets in a file of the offset log, by the sources' names."""
    try:
        # Not splitlines(): a source's JSON may contain other line ends, such as U+2028.
        version, _, *lines = file.read_text("utf-8").removesuffix("\n").split("\n")
    except (OSError, ValueError):
        raise CheckpointError(f"{file} is missing or is not a file of an offset log") from None
    if version == "v1":
        named = {str(number): line for number, line in enumerate(lines)}
    elif version == "v2":
        named = {name: text for name, _, text in (line.partition(":") for line in lines)}
    else:
        raise CheckpointError(
            f"{file} has the format {version[:20]!r}, expected v1 or v2; install a newer version "
            f"of nats-stream-source"
        )
    return {name: None if text == "-" else text for name, text in named.items()}


def _sources(name: str, committed: str | None, planned: str | None) -> list[Source]:
    """The streams of a source; one without an offset if it has none."""
    found: dict[str, Mapping[str, Position]] = {}
    filters: tuple[str, ...] = ()
    for which, text in (("committed", committed), ("planned", planned)):
        if text is None:
            continue
        try:
            loaded = json.loads(text)
        except ValueError:
            loaded = None
        if not _ours(loaded):
            return [Source(name, other=text[:80])]
        try:
            offset = Offset.parse(loaded)
        except OffsetError as error:
            return [Source(name, problem=str(error))]
        found[which], filters = offset.streams, offset.filter
    before, ahead = found.get("committed", {}), found.get("planned", {})
    streams = sorted(before.keys() | ahead.keys())
    return [Source(name, one, filters, before.get(one), ahead.get(one)) for one in streams] or [
        Source(name)
    ]


def _ours(loaded: Any) -> bool:
    if not isinstance(loaded, Mapping) or "v" not in loaded:
        return False
    return "streams" in loaded or {"stream", "stream_seq"} <= loaded.keys()


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
        type=_rows,
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


def _rows(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows")
    return int(text)


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
    if options.get("servers"):
        sources = asyncio.run(_compared(checkpoint.sources, options))
        checkpoint = replace(checkpoint, sources=tuple(sources))
    if arguments.json:
        print_json(_as_json(checkpoint))
    elif arguments.prometheus:
        _print_metrics(checkpoint)
    else:
        _print(checkpoint)
        if not options.get("servers") and any(source.stream for source in checkpoint.sources):
            print("not compared with the streams: name a server with --servers or --context")
    max_lag = sys.maxsize if arguments.max_lag is None else arguments.max_lag
    return int(any(one.problem or (one.lag or 0) > max_lag for one in checkpoint.sources))


# -- the live streams ---------------------------------------------------------------------------


async def _compared(sources: Sequence[Source], options: Mapping[str, str]) -> list[Source]:
    settings = connection_settings(parse(options, CONNECTION))
    async with await Connection.open(settings, retry=False) as connection:
        shared = SharedConnection(connection)
        return await gather_limited(lambda one: _live(shared, one, options), sources, _PARALLEL)


async def _live(connection: SharedConnection, source: Source, options: Mapping[str, str]) -> Source:
    """The source, compared with its stream."""
    if source.stream is None:
        return source
    at, query = source.offset(source.position), _query(source, source.stream, options)
    planner = QueryPlanner(query, connection)
    try:
        info = await query.stream_info(await connection.jetstream(), source.stream)
    except NatsSourceError as error:
        if error.code != 404 and not isinstance(error, ConfigurationError):
            raise
        return replace(source, problem=str(error))
    source = replace(source, first_seq=info.first_seq, last_seq=info.last_seq)
    try:
        if source.planned is not None:
            await planner.tasks(at, source.offset(source.planned))
        # A micro-batch may end before the last sequence, after a bucket's initial values.
        end = await planner.latest_offset(at)
        end = planner.stream_end or end
    except (ConfigurationError, DataLossError, OffsetError) as error:
        return replace(source, problem=str(error))
    rows, seconds = lag(source.position, end.streams[info.name])
    size = None if rows is None else rows * info.nbytes // max(1, info.messages)
    return replace(source, lag=rows, lag_seconds=seconds, lag_bytes=size)


def _query(source: Source, stream: str, options: Mapping[str, str]) -> FormatAdapter:
    filters = ",".join(source.filter)
    if (bucket := source.bucket) is not None:
        keys = {"keys": filters} if filters else {}
        return KvFormat(kv_options({**options, "bucket": bucket, **keys}))
    subjects = {"filterSubjects": filters} if filters else {}
    return StreamFormat(stream_options({**options, "stream": stream, **subjects}))


# -- the report ---------------------------------------------------------------------------------


def _as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint": str(checkpoint.path),
        "query": checkpoint.query_id,
        "committed_batch": checkpoint.committed,
        "planned_batch": checkpoint.planned,
        "frame_scanner": select_frame_scanner(),
        "sources": [_source_json(source) for source in checkpoint.sources],
    }


def _source_json(source: Source) -> dict[str, Any]:
    committed, planned = source.committed, source.planned
    return {
        "source": source.name,
        "stream": source.stream,
        "bucket": source.bucket,
        "committed": source.offset(committed).to_json() if committed else None,
        "planned": source.offset(planned).to_json() if planned else None,
        "problem": source.problem,
        "other": source.other,
        "first_seq": source.first_seq,
        "last_seq": source.last_seq,
        "lag": source.lag,
        "lag_seconds": source.lag_seconds,
    }


def _print_metrics(checkpoint: Checkpoint) -> None:
    # Imported here: the other reports do not require the extra.
    from nats_stream_source.metrics.recorder import Lag, Recorder
    from nats_stream_source.metrics.table import PROBLEM

    recorder, query = Recorder(), checkpoint.query_id or str(checkpoint.path)
    lags: dict[str, dict[str, Lag]] = {}
    for source in checkpoint.sources:
        if source.other is not None:
            continue
        stream = source.stream or ""
        recorder.set(PROBLEM, source.problem is not None, query, source.name, stream)
        behind = Lag(source.lag, source.lag_seconds, source.lag_bytes)
        lags.setdefault(source.name, {})[stream] = behind
        if source.problem is not None:
            print(source.problem, file=sys.stderr)
    for name, of_source in lags.items():
        recorder.set_lags(query, name, of_source)
    print(recorder.text(), end="")


def _print(checkpoint: Checkpoint) -> None:
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
    for source in checkpoint.sources:
        print("", *_lines(source, checkpoint), sep="\n")


def _lines(source: Source, checkpoint: Checkpoint) -> list[str]:
    if source.stream is None and source.problem is not None:
        return [f"source {source.name}: {source.problem}"]
    if source.other is not None:
        return [f"source {source.name} is not of this package: {source.other}"]
    at = source.committed or source.planned
    if at is None:
        return [f"source {source.name} has no offset yet"]
    bucket = source.bucket
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
            start, end = range_between(source.position, ahead)
        except OffsetError as error:
            return [*lines, f"  planned   {error}"]
        lines.append(
            f"  planned   batch {checkpoint.planned}: {word}s "
            + (f"{start + 1:,} to {end:,}" if end > start else "none")
        )
    if source.last_seq is not None:
        lines.append(f"  today     {source.first_seq:,} to {source.last_seq:,}")
    if source.problem is not None:
        return [*lines, f"  differs   {source.problem}"]
    if source.lag is not None:
        behind = "" if source.lag_seconds is None else f", {source.lag_seconds:,.3f} s"
        lines.append(f"  lag       {source.lag:,} rows{behind}")
    return lines
