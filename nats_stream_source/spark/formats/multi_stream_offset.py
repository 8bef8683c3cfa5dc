"""The Spark offset of a query of several streams: one position for each stream.

As JSON in the checkpoint, in format 2; the fields of a stream are those of format 1
(``spark.formats.offsets``)::

    {"v": 2, "started": "2026-11-20T23:55:00Z", "filter": ["plane.>"], "streams":
        {"KV_fleet": {"created": "2026-11-20T23:54:01.123456789Z", "epoch": 0, "origin": 0,
                      "stream_seq": 1234, "time": "2026-11-20T23:59:12.000000001Z",
                      "consumer_seq": 1100, "initial_through": 900}}}

``started`` is the server's time at the start of the query: a stream that was created later is read
from its first message, whatever the start position of the query is. An offset of format 1 is that
of a query of one stream, and a query of several streams can resume from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nats_stream_source.errors import OffsetError
from nats_stream_source.spark.formats.offsets import (
    ACTION,
    FAILED,
    Offset,
    strings_field,
    timestamp_field,
)

VERSION = 2

NO_STREAM_YET = "1970-01-01T00:00:00Z"
"""``started`` of a query that began without a stream: each one was created later."""


@dataclass(frozen=True, slots=True)
class MultiStreamOffset:
    """The positions of a query in several streams.

    Attributes:
        started: the server's time when the query started; None in a query that has resumed from an
            offset of one stream.
        filter: the key or subject filters of the query, sorted; empty for all.
        streams: the position in each stream by the stream's name.
    """

    started: str | None
    filter: tuple[str, ...]
    streams: Mapping[str, Offset]

    def __repr__(self) -> str:
        ends = ", ".join(f"{name} {at.stream_seq}" for name, at in self.streams.items())
        return f"<MultiStreamOffset {ends or 'without a stream'}>"

    def to_json(self) -> dict[str, Any]:
        """The JSON object that Spark stores; in a fixed order, since Spark compares strings."""
        return {
            "v": VERSION,
            "started": self.started,
            "filter": list(self.filter),
            "streams": {
                name: {
                    "created": at.created,
                    "epoch": at.epoch,
                    "origin": at.origin,
                    "stream_seq": at.stream_seq,
                    "time": at.time,
                    "consumer_seq": at.consumer_seq,
                    "initial_through": at.initial_through,
                }
                for name, at in sorted(self.streams.items())
            },
        }

    @classmethod
    def parse(cls, json: Mapping[str, Any]) -> MultiStreamOffset:
        """From the checkpoint's JSON object, of format 2 or 1.

        Raises:
            OffsetError: a newer version wrote the offset, or it is not an offset of this source.
        """
        version = json.get("v")
        if version != VERSION or type(json.get("streams")) is not dict:
            if version == VERSION:
                raise OffsetError(
                    f"{FAILED}: field 'streams' is missing in {dict(json)!r}; {ACTION}"
                )
            one = Offset.parse(json)
            return cls(None, one.filter, {one.stream: one})
        try:
            filters = strings_field(json, "filter")
            started = None if json["started"] is None else timestamp_field(json, "started")
        except KeyError as missing:
            raise OffsetError(
                f"{FAILED}: field {missing} is missing in {dict(json)!r}; {ACTION}"
            ) from None
        streams = {
            name: Offset.parse_fields(fields, name, filters)
            for name, fields in json["streams"].items()
        }
        return cls(started, filters, streams)


def parse_offset(json: Mapping[str, Any]) -> Offset | MultiStreamOffset:
    """From the checkpoint's JSON object, of either format.

    Raises:
        OffsetError: a newer version wrote the offset, or it is not an offset of this source.
    """
    return MultiStreamOffset.parse(json) if json.get("v") == VERSION else Offset.parse(json)
