"""The Spark offset: where a query stands in a stream.

An offset is all that a query remembers; nothing is kept on the server. As JSON in the checkpoint::

    {"v": 1, "stream": "KV_fleet", "created": "2026-11-20T23:55:01.123456789Z", "epoch": 0,
     "origin": 0, "stream_seq": 1234, "time": "2026-11-20T23:59:12.000000001Z",
     "consumer_seq": 1100, "initial_through": 900, "filter": ["plane.>"]}

Two offsets make the range ``(start.stream_seq, end.stream_seq]``, with one exception. Spark pairs
the logged end of a first batch that failed with a *new* initial offset, which may stand elsewhere
by then. ``origin``, the sequence after which the query (or its epoch) began, decides: the range
begins at ``start.stream_seq`` only if both offsets have the same origin and epoch, else at
``end.origin``.

Example: an ``updatesOnly`` query begins at 100 and logs ``(100, 120]``; its driver dies before the
commit; meanwhile the stream grows to 150. Spark asks for the initial offset (150) and then for the
partitions of 150 to 120. The origins differ (150, 100), so the range is ``(100, 120]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nats_stream_source.errors import OffsetError, ProtocolError
from nats_stream_source.jetstream.times import nanoseconds

VERSION = 1


@dataclass(frozen=True, slots=True)
class Offset:
    """Where a query stands.

    Attributes:
        stream, created: the stream's name and creation time: its identity.
        epoch: how often the stream was replaced or set back under ``failOnDataLoss=false``.
        origin: the sequence after which the query, or this epoch, began.
        stream_seq: the last stream sequence of the range.
        time: of the message at ``stream_seq``, as the server writes it; None when there was none.
        consumer_seq: how many messages an ordered consumer that was never interrupted and never
            behind would have delivered; for reports only.
        initial_through: End-Of-Initial-Data: rows up to this sequence are initial values.
        filter: the key filters of the query, sorted; none for all keys.
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
        """As Spark stores it; keys in a fixed order, since Spark compares the texts."""
        return {"v": VERSION, **asdict(self), "filter": list(self.filter)}

    @classmethod
    def parse(cls, json: Mapping[str, Any]) -> Offset:
        """From the checkpoint's JSON object.

        Raises:
            OffsetError: written by a newer version, or not an offset of this source.
        """
        version = json.get("v")
        if isinstance(version, int) and version > VERSION:
            raise OffsetError(
                f"the checkpoint's offset has format {version}, this version of "
                f"nats-stream-source reads up to {VERSION}: install the newer one that wrote it"
            )
        if version != VERSION:
            raise OffsetError(f"the checkpoint's offset is not of this source: {dict(json)!r}")
        try:
            offset = cls(
                stream=_typed(json, "stream", str),
                created=_typed(json, "created", str),
                epoch=_typed(json, "epoch", int),
                origin=_typed(json, "origin", int),
                stream_seq=_typed(json, "stream_seq", int),
                time=None if json["time"] is None else _time(json, "time"),
                consumer_seq=_typed(json, "consumer_seq", int),
                initial_through=_typed(json, "initial_through", int),
                filter=_texts(json, "filter"),
            )
        except KeyError as missing:
            raise OffsetError(f"the checkpoint's offset has no {missing}: {dict(json)!r}") from None
        if not 0 <= offset.origin <= offset.stream_seq or offset.epoch < 0:
            raise OffsetError(f"the checkpoint's offset contradicts itself: {offset}")
        return offset


def _typed(json: Mapping[str, Any], name: str, kind: type) -> Any:
    value = json[name]
    if type(value) is not kind:
        raise OffsetError(f"the checkpoint's offset has {name}={value!r}, not a {kind.__name__}")
    return value


def _time(json: Mapping[str, Any], name: str) -> str:
    value: str = _typed(json, name, str)
    try:
        nanoseconds(value)
    except ProtocolError:
        raise OffsetError(f"the checkpoint's offset has {name}={value!r}, not a time") from None
    return value


def _texts(json: Mapping[str, Any], name: str) -> tuple[str, ...]:
    values: list[Any] = _typed(json, name, list)
    if not all(type(value) is str for value in values):
        raise OffsetError(f"the checkpoint's offset has {name}={values!r}, not a list of str")
    return tuple(values)


def behind(at: Offset, newest: Offset) -> tuple[int, float | None]:
    """The lag of ``at``: rows, and seconds between the two messages, None where one is gone."""
    rows = max(0, newest.consumer_seq - at.consumer_seq)
    if at.time is None or newest.time is None:
        return rows, None
    return rows, max(0, nanoseconds(newest.time) - nanoseconds(at.time)) / 1e9


def range_between(start: Offset, end: Offset) -> tuple[int, int]:
    """The range ``(start, end]`` of stream sequences between two offsets.

    Raises:
        OffsetError: the end lies before the start within one epoch.
    """
    same = (start.epoch, start.origin, start.created) == (end.epoch, end.origin, end.created)
    begin = start.stream_seq if same else end.origin
    if begin > end.stream_seq:
        raise OffsetError(
            f"the checkpoint's offsets run backwards, from {begin} to {end.stream_seq}: "
            f"was one of them edited by hand?"
        )
    return begin, end.stream_seq
