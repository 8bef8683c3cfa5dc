"""Fill and read streams, for the tests of ``nats_stream`` without Spark."""

from __future__ import annotations

from typing import Any

from tests.support.nats.buckets import api, publish
from tests.support.query_driver.driver import Record, new_query


def fill(url: str, name: str, count: int, subjects: int = 3) -> None:
    publish(url, ((f"{name}.{i % subjects}", b"%d" % i, None) for i in range(1, count + 1)))


def erase(url: str, name: str, *found: int) -> None:
    for seq in found:
        api(url, f"STREAM.MSG.DELETE.{name}", {"seq": seq})


def read(url: str, stream: str | None, **options: Any) -> list[Record]:
    with new_query(url, stream=stream, **options) as query:
        return query.read_new()
