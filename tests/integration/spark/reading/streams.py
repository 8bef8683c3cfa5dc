"""Fill and read streams, for the tests of readers without Spark."""

from __future__ import annotations

from typing import Any

import pytest

from nats_stream_source.jetstream.ordered import reader as ordered_reader
from tests.support.nats.buckets import api, publish
from tests.support.query_driver.driver import Record, read_all


def fill(url: str, name: str, count: int, subjects: int = 3) -> None:
    publish(url, ((f"{name}.{i % subjects}", b"%d" % i, None) for i in range(1, count + 1)))


def erase(url: str, name: str, *found: int) -> None:
    for seq in found:
        api(url, f"STREAM.MSG.DELETE.{name}", {"seq": seq})


def read(url: str, stream: str | None, **options: Any) -> list[Record]:
    return read_all(url, stream=stream, **options)


def without_delta(found: list[Record]) -> list[Record]:
    return [{name: value for name, value in row.items() if name != "delta"} for row in found]


def both_ways(url: str, **options: Any) -> list[Record]:
    """The rows by small ranges, which are those by a consumer, but for ``delta``."""
    few = read_all(url, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered_reader, "MAX_SEQUENCES", 0)
        many = read_all(url, **options)
    assert without_delta(few) == without_delta(many)
    return few
