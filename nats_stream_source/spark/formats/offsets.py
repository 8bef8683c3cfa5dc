"""The Spark offset: the position of a query in a stream.

The offset is the only state of a query; the server keeps none. As JSON in the checkpoint::

    {"v": 1, "stream": "KV_fleet", "created": "2026-11-20T23:55:01.123456789Z", "epoch": 0,
     "origin": 0, "stream_seq": 1234, "time": "2026-11-20T23:59:12.000000001Z",
     "consumer_seq": 1100, "initial_through": 900, "filter": ["plane.>"]}

Two offsets define the range ``(start.stream_seq, end.stream_seq]``, with one exception. Spark pairs
the logged end of a first micro-batch that failed with a *new* initial offset, which may have
another position. ``origin``, the sequence after which the query (or its epoch) started, decides:
the range starts at ``start.stream_seq`` only if both offsets have the same origin and epoch,
otherwise at ``end.origin``.

Example: an ``updatesOnly`` query starts at 100 and logs ``(100, 120]``; its driver fails before the
commit; meanwhile the stream grows to 150. Spark requests the initial offset (150) and then the
partitions of 150 to 120. The origins differ (150, 100), so the range is ``(100, 120]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nats_stream_source.errors import OffsetError, ProtocolError
from nats_stream_source.jetstream.times import nanoseconds

VERSION = 1
_NEWEST = 2  # the format of several streams: spark.formats.multi_stream_offset


@dataclass(frozen=True, slots=True)
class Offset:
    """The position of a query.

    Attributes:
        stream, created: the stream's name and creation time, which identify it.
        epoch: how often the stream was re-created or rolled back under ``failOnDataLoss=false``.
        origin: the sequence after which the query, or this epoch, started.
        stream_seq: the last stream sequence of the range.
        time: the timestamp of the message at ``stream_seq``, as the server writes it; None if the
            stream did not have that message.
        consumer_seq: the number of messages that an ordered consumer without interruption or lag
            would have delivered; for reports only.
        initial_through: End-Of-Initial-Data: rows up to this sequence are initial values.
        filter: the key or subject filters of the query, sorted; empty for all.
    """

    stream: str
    created: str
    epoch: int
    origin: int
    stream_seq: int
    time: str | None
    consumer_seq: int
    initial_through: int
    filter: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The JSON object that Spark stores; in a fixed order, since Spark compares strings."""
        return {"v": VERSION, **asdict(self), "filter": list(self.filter)}

    @classmethod
    def parse(cls, json: Mapping[str, Any]) -> Offset:
        """From the checkpoint's JSON object.

        Raises:
            OffsetError: a newer version wrote the offset, or it is not an offset of this source.
        """
        version = json.get("v")
        if version == _NEWEST:
            raise OffsetError(
                f"{FAILED}: it is of several streams ({_names(json)}), and the query reads one; "
                f"set the options of several streams again, such as 'buckets' or 'streams', or use "
                f"another checkpoint location"
            )
        if isinstance(version, int) and version > VERSION:
            raise OffsetError(
                f"{FAILED}: format is {version}, expected {_NEWEST} or lower; install the version "
                f"of nats-stream-source that wrote it, or a newer one"
            )
        if version != VERSION:
            raise OffsetError(
                f"{FAILED}: found {dict(json)!r}, expected an offset of this source; {ACTION}"
            )
        try:
            return cls.parse_fields(
                json, _typed(json, "stream", str), strings_field(json, "filter")
            )
        except KeyError as missing:
            raise _missing(missing, json) from None

    @classmethod
    def parse_fields(cls, json: Mapping[str, Any], stream: str, filters: tuple[str, ...]) -> Offset:
        """From the fields of one stream in the checkpoint's JSON object.

        Raises:
            OffsetError: a field is missing or invalid.
        """
        try:
            offset = cls(
                stream=stream,
                created=_typed(json, "created", str),
                epoch=_typed(json, "epoch", int),
                origin=_typed(json, "origin", int),
                stream_seq=_typed(json, "stream_seq", int),
                time=None if json["time"] is None else timestamp_field(json, "time"),
                consumer_seq=_typed(json, "consumer_seq", int),
                initial_through=_typed(json, "initial_through", int),
                filter=filters,
            )
        except (AttributeError, TypeError):
            raise OffsetError(
                f"{FAILED}: found {json!r} for stream {stream}, expected a position; {ACTION}"
            ) from None
        except KeyError as missing:
            raise _missing(missing, json) from None
        if not 0 <= offset.origin <= offset.stream_seq or offset.epoch < 0:
            raise OffsetError(
                f"{FAILED}: found {offset}, expected 0 <= origin <= stream_seq and epoch >= 0; "
                f"{ACTION}"
            )
        return offset


FAILED = "could not read the checkpoint's offset"
ACTION = "restore the checkpoint, or use another checkpoint location"


def _typed(json: Mapping[str, Any], name: str, kind: type) -> Any:
    value = json[name]
    if type(value) is not kind:
        raise OffsetError(f"{FAILED}: {name}={value!r}, expected {kind.__name__}; {ACTION}")
    return value


def _missing(name: KeyError, json: Mapping[str, Any]) -> OffsetError:
    return OffsetError(f"{FAILED}: field {name} is missing in {dict(json)!r}; {ACTION}")


def _names(json: Mapping[str, Any]) -> str:
    streams = json.get("streams")
    names = sorted(streams) if isinstance(streams, Mapping) else []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none yet") + more


def timestamp_field(json: Mapping[str, Any], name: str) -> str:
    """The RFC 3339 timestamp ``name``; raises OffsetError for anything else."""
    value: str = _typed(json, name, str)
    try:
        nanoseconds(value)
    except ProtocolError:
        raise OffsetError(
            f"{FAILED}: {name}={value!r}, expected an RFC 3339 timestamp; {ACTION}"
        ) from None
    return value


def strings_field(json: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The list of strings ``name``; raises OffsetError for anything else."""
    values: list[Any] = _typed(json, name, list)
    if not all(type(value) is str for value in values):
        raise OffsetError(f"{FAILED}: {name}={values!r}, expected a list of str; {ACTION}")
    return tuple(values)


def lag_between(at: Offset, newest: Offset) -> tuple[int, float | None]:
    """The lag of ``at``: rows, and seconds between the two messages; None where one is missing."""
    rows = max(0, newest.consumer_seq - at.consumer_seq)
    if at.time is None or newest.time is None:
        return rows, None
    return rows, max(0, nanoseconds(newest.time) - nanoseconds(at.time)) / 1e9


def range_between(start: Offset, end: Offset) -> tuple[int, int]:
    """The range ``(start, end]`` of stream sequences between two offsets.

    Raises:
        OffsetError: the end is lower than the start within one epoch.
    """
    same = (start.epoch, start.origin) == (end.epoch, end.origin)
    first = start.stream_seq if same else end.origin
    if first > end.stream_seq:
        raise OffsetError(
            f"could not plan a micro-batch: the checkpoint's offsets run backwards, from {first} "
            f"to {end.stream_seq}; restore the checkpoint if an offset was edited by hand, or use "
            f"another checkpoint location"
        )
    return first, end.stream_seq
