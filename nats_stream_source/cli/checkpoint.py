"""A query's checkpoint directory, as Spark's file system checkpoints have it. Pure but for reading.

``offsets/N`` is written before micro-batch N is read, ``commits/N`` after it is in the sink. A file
of the offset log is lines: the log's version, Spark's own object, then one line for each source, in
the order in which the query has them: the source's offset as JSON, or ``-`` where it has none. In
version 2 of the log (``spark.sql.streaming.offsetLog.formatVersion``) each of them begins with the
source's name and a colon, and their order says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from nats_stream_source.errors import NatsSourceError, OffsetError
from nats_stream_source.source.offsets import Offset


class CheckpointError(NatsSourceError):
    """A directory is no checkpoint, or one that cannot be read."""


@dataclass(frozen=True, slots=True)
class Source:
    """One source of a query, by its offsets in the log.

    Attributes:
        name: its place within the query, from 0, or the name that the query gave it.
        committed: where the last committed micro-batch ended; None before one.
        planned: where the last planned one ended, when that is not committed.
        problem: why its offsets cannot be read: a newer version's, or damaged.
        other: the offset's text, of a source that is not of this package; shortened.
    """

    name: str
    committed: Offset | None = None
    planned: Offset | None = None
    problem: str | None = None
    other: str | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A query's memory.

    Attributes:
        query_id: Spark's id of the query, which stays over restarts.
        committed: the last micro-batch that is in the sink; None before one.
        planned: the last one that was planned; None before one.
    """

    path: Path
    query_id: str
    committed: int | None
    planned: int | None
    sources: tuple[Source, ...]


def read_checkpoint(where: str) -> Checkpoint:
    """Read the checkpoint directory ``where``, a path or a ``file:`` URI.

    Raises:
        CheckpointError: there is none, it is none, or it is not on this machine.
    """
    path = _local(where)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no directory")
    try:
        query_id = str(json.loads((path / "metadata").read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no file 'metadata' of a query. The directory is "
            f"what the query has as checkpointLocation"
        ) from None
    planned, committed = _last(path / "offsets"), _last(path / "commits")
    if planned is None:
        return Checkpoint(path, query_id, committed, None, ())
    newest = _log(path / "offsets" / str(planned))
    before: dict[str, str | None] = {}
    if committed is not None:
        before = newest if planned == committed else _log(path / "offsets" / str(committed))
    names = sorted(newest, key=lambda name: (not name.isdecimal(), name.zfill(9)))
    sources = tuple(
        _source(name, before.get(name), newest[name] if planned != committed else None)
        for name in names
    )
    return Checkpoint(path, query_id, committed, planned, sources)


def _local(where: str) -> Path:
    parts = urlsplit(where)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    if "://" in where:
        raise CheckpointError(
            f"{where} is not on this machine: copy the directories 'offsets' and 'commits' and the "
            f"file 'metadata' of it, and name the copy"
        )
    return Path(where)


def _last(log: Path) -> int | None:
    """The highest number of a log's files."""
    numbers = [int(file.name) for file in log.glob("[0-9]*") if file.name.isdecimal()]
    return max(numbers, default=None)


def _log(file: Path) -> dict[str, str | None]:
    """The sources' offsets in a file of the offset log, by the sources' names."""
    try:
        # Not by splitlines(): a source's JSON may hold other ends of lines, as U+2028.
        version, _, *lines = file.read_text("utf-8").removesuffix("\n").split("\n")
    except (OSError, ValueError):
        raise CheckpointError(f"{file} is missing or is not a file of an offset log") from None
    if version == "v1":
        named = {str(number): line for number, line in enumerate(lines)}
    elif version == "v2":
        named = {name: text for name, _, text in (line.partition(":") for line in lines)}
    else:
        raise CheckpointError(
            f"{file} has the format {version[:20]!r}, this version of nats-stream-source reads v1 "
            f"and v2: install a newer one"
        )
    return {name: None if text == "-" else text for name, text in named.items()}


def _source(name: str, committed: str | None, planned: str | None) -> Source:
    found: dict[str, Offset] = {}
    for which, text in (("committed", committed), ("planned", planned)):
        if text is None:
            continue
        try:
            loaded = json.loads(text)
        except ValueError:
            loaded = None
        if not _ours(loaded):
            return Source(name, other=text[:80])
        try:
            found[which] = Offset.parse(loaded)
        except OffsetError as error:
            return Source(name, problem=str(error))
    return Source(name, found.get("committed"), found.get("planned"))


def _ours(loaded: Any) -> bool:
    return isinstance(loaded, Mapping) and {"v", "stream", "stream_seq"} <= loaded.keys()
