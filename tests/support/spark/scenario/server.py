"""Actions on the server and its store: re-created buckets, restores, restarts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.nats import buckets
from tests.support.spark.scenario.scene import Scene
from tests.support.spark.scenario.writes import Create


@dataclass(frozen=True)
class Recreate:
    """Delete the bucket and create it again, empty, which creates another stream."""

    history: int = 1

    def run(self, scene: Scene) -> None:
        before = scene.info()["created"]
        buckets.api(scene.url, f"STREAM.DELETE.{scene.stream}")
        Create(self.history).run(scene)
        assert scene.info()["created"] != before


@dataclass(frozen=True)
class Backup:
    """Copy the server's store while the server is stopped."""

    def run(self, scene: Scene) -> None:
        scene.backup = scene.directory / "store"
        scene.server.terminate()
        shutil.copytree(scene.server.store / "jetstream", scene.backup)
        scene.server.start()


@dataclass(frozen=True)
class Restore:
    """Restore the copy of ``Backup``, which rolls the stream back to an earlier sequence."""

    def run(self, scene: Scene) -> None:
        assert scene.backup is not None
        before = scene.info()
        scene.server.terminate()
        shutil.rmtree(scene.server.store / "jetstream")
        shutil.copytree(scene.backup, scene.server.store / "jetstream")
        scene.server.start()
        after = scene.info()
        assert after["created"] == before["created"]
        assert after["state"]["last_seq"] < before["state"]["last_seq"]


@dataclass(frozen=True)
class RestartServer:
    """Stop the server with a graceful shutdown and start it again."""

    def run(self, scene: Scene) -> None:
        scene.server.restart()


@dataclass(frozen=True)
class ExpectState:
    """Compare items of the stream's ``state``, as the server reports them."""

    state: Mapping[str, int]

    def run(self, scene: Scene) -> None:
        state = scene.info()["state"]
        assert {name: state[name] for name in self.state} == self.state
