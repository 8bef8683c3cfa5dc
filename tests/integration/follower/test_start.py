"""The start of a follower beside another one of the same table."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.follower.conftest import Followed, before_next
from tests.integration.follower.table import values


async def test_position_of_another_follower_committed_during_start_is_continued(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.create()
    followed.put("a=1")
    await followed.once()

    def put_and_follow() -> None:
        followed.put("b=1")
        assert asyncio.run(followed.once()).rows == 1

    with before_next(monkeypatch, "open", put_and_follow):
        assert (await followed.once()).rows == 0
    assert values(followed.table) == {"a": b"1", "b": b"1"}
