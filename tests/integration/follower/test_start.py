"""The start of a follower beside another one of the same table."""

from __future__ import annotations

import asyncio

import pytest

from nats_stream_source.delta.driver.position import StreamPosition
from nats_stream_source.delta.follower.table import FollowedTable
from tests.integration.follower.conftest import Followed
from tests.integration.follower.table import values


async def test_position_of_another_follower_committed_during_start_is_continued(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.create()
    followed.put("a=1")
    await followed.once()
    open_table = FollowedTable.open

    def overtaken(table: FollowedTable) -> StreamPosition | None:
        monkeypatch.undo()
        followed.put("b=1")
        assert asyncio.run(followed.once()).rows == 1
        return open_table(table)

    monkeypatch.setattr(FollowedTable, "open", overtaken)
    assert (await followed.once()).rows == 0
    assert FollowedTable.open is open_table
    assert values(followed.table) == {"a": b"1", "b": b"1"}
