"""The Spark offset: the position of a query in each of its streams.

The offset is the only state of a query; the server keeps none. As JSON in the checkpoint, in
format 1 for a query of one stream, and in format 2 for one of several::

    {"v": 1, "stream": "KV_fleet", "created": "2026-11-20T23:55:01.123456789Z", "epoch": 0,
     "origin": 0, "stream_seq": 1234, "time": "2026-11-20T23:59:12.000000001Z",
     "consumer_seq": 1100, "initial_through": 900, "filter": ["plane.>"]}

    {"v": 2, "started": "2026-11-20T23:55:00Z", "filter": ["plane.>"], "streams":
        {"KV_fleet": {"created": "2026-11-20T23:54:01.123456789Z", "epoch": 0, "origin": 0,
                      "stream_seq": 1234, "time": "2026-11-20T23:59:12.000000001Z",
                      "consumer_seq": 1100, "initial_through": 900}}}

``started`` is the server's time at the start of the query: a stream that was created later is read
from its first message, whatever the start position of the query is. A query of several streams can
resume from an offset of format 1.

Two positions in a stream define the range ``(start.stream_seq, end.stream_seq]``, with one
exception. Spark pairs the logged end of a first micro-batch that failed with a *new* initial
offset, which may have another position. ``origin``, the sequence after which the query (or its
epoch) started, decides: the range starts at ``start.stream_seq`` only if both positions have the
same origin and epoch, otherwise at ``end.origin``.

Example: an ``updatesOnly`` query starts at 100 and logs ``(100, 120]``; its driver fails before the
commit; meanwhile the stream grows to 150. Spark requests the initial offset (150) and then the
partitions of 150 to 120. The origins differ (150, 100), so the range is ``(100, 120]``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nats_stream_source.errors import OffsetError, ProtocolError
from nats_stream_source.jetstream.times import nanoseconds
from nats_stream_source.metrics.table import Counts

ONE_STREAM = 1
SEVERAL_STREAMS = 2
"""The formats, by the streams that a query reads; the higher number is the newest format."""

NO_STREAM_YET = "1970-01-01T00:00:00Z"
"""``started`` of a query that began without a stream: each one was created later."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a query in one stream; in the order of the fields in JSON.

    Attributes:
        created: the stream's creation time, which identifies it together with its name.
        epoch: how often the stream was re-created or rolled back under ``failOnDataLoss=false``.
        origin: the sequence after which the query, or this epoch, started.
        stream_seq: the last stream sequence of the range.
        time: the timestamp of the message at ``stream_seq``, as the server writes it; None if the
            stream did not have that message.
        consumer_seq: the number of messages that an ordered consumer without interruption or lag
            would have delivered; for reports only.
        initial_through: End-Of-Initial-Data: rows up to this sequence are initial values.
    """

    created: str
    epoch: int
    origin: int
    stream_seq: int
    time: str | None
    consumer_seq: int
    initial_through: int

    @classmethod
    def parse(cls, json: Mapping[str, Any], stream: str) -> Position:
        """From the fields of ``stream`` in the checkpoint's JSON object; raises OffsetError."""
        try:
            fields = {name: _value(json, name) for name in cls.__slots__}
        except (AttributeError, TypeError):
            raise OffsetError(
                f"{_FAILED}: found {json!r} for stream {stream}, expected a position; {_ACTION}"
            ) from None
        except KeyError as missing:
            raise _missing(missing, json) from None
        position = cls(**fields)
        if not 0 <= position.origin <= position.stream_seq or position.epoch < 0:
            raise OffsetError(
                f"{_FAILED}: found {position} for stream {stream}, expected 0 <= origin <= "
                f"stream_seq and epoch >= 0; {_ACTION}"
            )
        return position

    def to_json(self) -> dict[str, Any]:
        """The fields of the JSON object, in their order."""
        return {name: getattr(self, name) for name in self.__slots__}

    def at_origin(self) -> Position:
        """The position at which the query, or this epoch, started."""
        return replace(self, stream_seq=self.origin, time=None, consumer_seq=0)


@dataclass(frozen=True, slots=True)
class Offset:
    """The position of a query.

    Attributes:
        streams: the position in each stream by the stream's name.
        filter: the key or subject filters of the query, sorted; empty for all.
        version: the format: :data:`ONE_STREAM` or :data:`SEVERAL_STREAMS`.
        started: the server's time when the query started; None in format 1, and where a query of
            several streams has resumed from it.
    """

    streams: Mapping[str, Position]
    filter: tuple[str, ...]
    version: int = SEVERAL_STREAMS
    started: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON object that Spark stores; in a fixed order, since Spark compares strings."""
        filters = list(self.filter)
        if self.version == ONE_STREAM:
            ((stream, position),) = self.streams.items()
            return {"v": ONE_STREAM, "stream": stream, **position.to_json(), "filter": filters}
        streams = {stream: at.to_json() for stream, at in sorted(self.streams.items())}
        return {
            "v": SEVERAL_STREAMS,
            "started": self.started,
            "filter": filters,
            "streams": streams,
        }

    @classmethod
    def parse(cls, json: Mapping[str, Any]) -> Offset:
        """From the checkpoint's JSON object, of either format.

        Raises:
            OffsetError: a newer version wrote the offset, or it is not an offset of this source.
        """
        version = json.get("v")
        if isinstance(version, int) and version > SEVERAL_STREAMS:
            raise OffsetError(
                f"{_FAILED}: format is {version}, expected {SEVERAL_STREAMS} or lower; install the "
                f"version of nats-stream-source that wrote it, or a newer one"
            )
        try:
            if version == ONE_STREAM:
                stream, filters = _value(json, "stream"), tuple(_value(json, "filter"))
                return cls({stream: Position.parse(json, stream)}, filters, ONE_STREAM)
            if version == SEVERAL_STREAMS:
                filters, started = tuple(_value(json, "filter")), _value(json, "started")
                streams = {
                    stream: Position.parse(fields, stream)
                    for stream, fields in _value(json, "streams").items()
                }
                return cls(streams, filters, SEVERAL_STREAMS, started)
        except KeyError as missing:
            raise _missing(missing, json) from None
        raise OffsetError(
            f"{_FAILED}: found {dict(json)!r}, expected an offset of this source; {_ACTION}"
        )


_FAILED = "could not read the checkpoint's offset"
_ACTION = "restore the checkpoint, or use another checkpoint location"


_TIMES = dict.fromkeys(("created", "time", "started"), str)
_KINDS = {"stream": str, "filter": list, "streams": dict, **_TIMES}  # the others are integers


def _value(json: Mapping[str, Any], name: str) -> Any:
    """The field ``name``; raises OffsetError for a value of another kind, KeyError without it."""
    value, kind = json[name], _KINDS.get(name, int)
    if value is None and name in ("time", "started"):
        return None
    expected = kind.__name__ if type(value) is not kind else ""
    if not expected and name == "filter" and not all(type(one) is str for one in value):
        expected = "a list of str"
    if not expected and name in _TIMES:
        try:
            nanoseconds(value)
        except ProtocolError:
            expected = "an RFC 3339 timestamp"
    if expected:
        raise OffsetError(f"{_FAILED}: {name}={value!r}, expected {expected}; {_ACTION}")
    return value


def _missing(name: KeyError, json: Mapping[str, Any]) -> OffsetError:
    return OffsetError(f"{_FAILED}: field {name} is missing in {dict(json)!r}; {_ACTION}")


def name_some(streams: Iterable[str]) -> str:
    """Up to three names of streams, for an error."""
    names = sorted(streams)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none yet") + more


def range_between(start: Position, end: Position) -> tuple[int, int]:
    """The range ``(start, end]`` of sequences; OffsetError if it runs backwards in one epoch."""
    same = (start.epoch, start.origin) == (end.epoch, end.origin)
    first = start.stream_seq if same else end.origin
    if first > end.stream_seq:
        raise OffsetError(
            f"could not plan a micro-batch: the checkpoint's offsets run backwards, from {first} "
            f"to {end.stream_seq}; restore the checkpoint if an offset was edited by hand, or use "
            f"another checkpoint location"
        )
    return first, end.stream_seq


REPORT = "report"
"""A further field of the stream's end, which the planner reports for the lag (since Spark 4.2) and
which is in no checkpoint. An executor cannot add to it; ``spark.task_counts`` is its way."""


@dataclass(frozen=True, slots=True)
class PlannerReport:
    """What a planner reports with the end of the stream.

    Attributes:
        counts: the counts of its process, since its start.
        bytes_behind: estimated, by stream; without those that are 0.
    """

    counts: Counts
    bytes_behind: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """The field's value; empty if there is nothing to report."""
        json: dict[str, Any] = {}
        if self.counts:
            json["counts"] = [[*key, amount] for key, amount in self.counts.items()]
        if self.bytes_behind:
            json["bytes_behind"] = dict(self.bytes_behind)
        return json

    @classmethod
    def parse(cls, latest: Any) -> PlannerReport:
        """From the reported end of the stream; an empty report if it has none."""
        report = (_object(latest) or {}).get(REPORT, {})
        counts: Counts = Counter()
        for *key, amount in report.get("counts", ()):
            counts[tuple(key)] = amount
        return cls(counts, report.get("bytes_behind", {}))


def positions(value: Any) -> tuple[Mapping[str, Position], tuple[str, ...]]:
    """The positions and filters of an offset of a report; empty for one of another source."""
    try:
        if (loaded := _object(value)) is not None:
            offset = Offset.parse(loaded)
            return offset.streams, offset.filter
    except OffsetError:
        pass
    return {}, ()


def lag(end: Position, newest: Position | None) -> tuple[int | None, float | None]:
    """Rows, and seconds between the messages, of two positions; None where unknown."""
    if newest is None or newest.epoch != end.epoch:
        return None, None
    rows = max(0, newest.consumer_seq - end.consumer_seq)
    if end.time is None or newest.time is None:
        return rows, None
    return rows, max(0, nanoseconds(newest.time) - nanoseconds(end.time)) / 1e9


def _object(value: Any) -> Mapping[str, Any] | None:
    try:
        loaded = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return loaded if isinstance(loaded, Mapping) else None
