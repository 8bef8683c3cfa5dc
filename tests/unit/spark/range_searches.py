"""Runs the searches of ``range_math`` over lists of sequences, without a server."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from nats_stream_source.spark.planning.range_math import (
    EVEN,
    Shape,
    limited_end,
)

T = TypeVar("T")


def search_result(search: Generator[int, Any, T], respond: Callable[[int], Any]) -> T:
    """Run a search to its result; ``respond`` returns the response to each request."""
    try:
        request = next(search)
        while True:
            request = search.send(respond(request))
    except StopIteration as stop:
        result: T = stop.value
        return result


def search_limit(
    stored: list[int], start: int, end: int, limit: int, shape: Shape = EVEN
) -> tuple[int, int, int]:
    """Return (limited end, rows, number of requests) for a stream with the sequences ``stored``."""
    requests: list[int] = []

    def rows_after(seq: int) -> int:
        assert start <= seq < end
        requests.append(seq)
        return sum(1 for s in stored if seq < s <= end)

    return (*search_result(limited_end(start, end, limit, shape=shape), rows_after), len(requests))


def overwritten(writes: int, keys: int, seed: int = 1) -> list[int]:
    """Return the last sequence of each key after ``writes`` writes to ``keys`` random keys."""
    chance = random.Random(seed)
    return sorted({chance.randrange(keys): seq for seq in range(1, writes + 1)}.values())
