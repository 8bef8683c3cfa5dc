"""A bucket on a server of its own, and followers of it in the test's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nats_stream_source.delta import Follower, FollowProgress
from nats_stream_source.delta.follower.table import FollowedTable
from nats_stream_source.embedded import NatsServer
from tests.support.nats import buckets
from tests.support.wait import wait_until_async


class Followed:
    """The bucket ``fleet`` and the table that follows it."""

    def __init__(self, server: NatsServer, table: Path) -> None:
        self.server = server
        self.url = server.url
        self.table = table

    def create(self, history: int = 1, **config: Any) -> None:
        buckets.create_bucket(self.url, "fleet", history, **config)

    def put(self, *entries: str) -> list[int]:
        """Put keys with their values, as ``"a=1"``."""
        pairs = [entry.split("=") for entry in entries]
        return buckets.put_many(self.url, "fleet", [(key, v.encode()) for key, v in pairs])

    def delete(self, key: str) -> int:
        return buckets.delete(self.url, "fleet", key)

    def follower(self, table: Path | None = None, **arguments: Any) -> Follower:
        return Follower("fleet", table or self.table, **{"servers": self.url, **arguments})

    async def once(self, table: Path | None = None, **arguments: Any) -> FollowProgress:
        """Follow until the table has what the bucket has."""
        return await asyncio.wait_for(self.follower(table, **arguments).run(once=True), 60)

    @contextlib.asynccontextmanager
    async def following(
        self, table: Path | None = None, **arguments: Any
    ) -> AsyncIterator[Follower]:
        """A follower that runs, and is stopped at the end of the block."""
        follower = self.follower(table, **arguments)
        task = asyncio.ensure_future(follower.run())
        try:
            await reaches(follower, self.last_seq, task)
            yield follower
            follower.stop()
            await asyncio.wait_for(asyncio.shield(task), 60)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def last_seq(self) -> int:
        return int(buckets.bucket_state(self.url, "fleet")["last_seq"])


async def reaches(
    follower: Follower, revision: int, task: asyncio.Future[Any] | None = None
) -> None:
    """Wait until the table has the entries up to a revision."""

    def has() -> bool:
        if task is not None and task.done():
            task.result()
        return follower.progress.revision >= revision

    await wait_until_async(has, f"the table has revision {revision}")


@contextlib.contextmanager
def before_next(
    monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]
) -> Iterator[None]:
    """Act before the next call of a method of the followed table; fail without such a call."""
    method = getattr(FollowedTable, name)

    def acted(table: FollowedTable, *given: Any, **named: Any) -> Any:
        patch.undo()
        act()
        return method(table, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(FollowedTable, name, acted)
        yield
        assert getattr(FollowedTable, name) is method


@pytest.fixture
def followed(request: pytest.FixtureRequest, nats_server: NatsServer, tmp_path: Path) -> Followed:
    """With a bucket of the configuration that is the parameter, by default one with history 1."""
    followed = Followed(nats_server, tmp_path / "fleet")
    followed.create(**getattr(request, "param", {}))
    return followed


def of_bucket(**config: Any) -> pytest.MarkDecorator:
    """Configure the bucket of :func:`followed`."""
    return pytest.mark.parametrize("followed", [config], indirect=True, ids=str)
