"""Reads a query's checkpoint directory in the format of Spark's file system checkpoints.

Spark writes ``offsets/N`` before it reads micro-batch N, and ``commits/N`` after the micro-batch is
in the sink. A file of the offset log consists of lines: the version of the log, Spark's own object,
then one line per source in the order of the query: the source's offset as JSON, or ``-`` without an
offset. In version 2 of the log (``spark.sql.streaming.offsetLog.formatVersion``) each of these
lines starts with the source's name and a colon, and their order has no meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nats_stream_source.errors import NatsSourceError, OffsetError
from nats_stream_source.rows.offsets import ONE_STREAM, Offset, Position


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
        problem: why its offsets cannot be read: a newer version, or damage.
        other: the offset of a source of another package, shortened.
    """

    name: str
    stream: str | None = None
    filter: tuple[str, ...] = ()
    committed: Position | None = None
    planned: Position | None = None
    problem: str | None = None
    other: str | None = None

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
    """The highest number of a log's files."""
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
