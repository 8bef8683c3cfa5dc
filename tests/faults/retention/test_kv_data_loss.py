"""Data loss and restores through Spark; ``tests/integration/spark/data_loss`` has all cases.

Each event is a real one, and its action verifies that it happened.
"""

from __future__ import annotations

from tests.support.nats.backup import back_up
from tests.support.spark.scenario import (
    Action,
    Backup,
    Create,
    Do,
    ExpectError,
    ExpectRows,
    Put,
    Recreate,
    Restore,
    Run,
    Scene,
    Start,
    Stop,
    Wait,
    play,
)

ACCEPT = {"failOnDataLoss": False}
READ = ("1 PUT a=1 initial", "2 PUT b=1 initial", "3 PUT c=1 initial")


def puts(*keys: str) -> tuple[Action, ...]:
    return tuple(Put(key, "1") for key in keys)


def after_batch(scene: Scene, batch_id: int, *actions: Action) -> Start:
    """Start a query; run the actions in its sink, while the planner does not poll."""

    def run(current: int) -> None:
        if current == batch_id:
            play(scene, *actions)

    return Start(after=run)


RESTORE = Do(lambda scene: back_up(scene.url, scene.stream)())


def test_bucket_recreated_while_query_runs(scene: Scene) -> None:
    play(
        scene,
        Create(),
        *puts("a", "b", "c"),
        after_batch(scene, 0, Recreate(), *puts("x", "y")),
        ExpectError("DataLossError", ("deleted and re-created", "failOnDataLoss=false"), rows=3),
        Run(ACCEPT),
        Put("z", "1"),
        Run(),  # the accepted loss is not reported again
        ExpectRows(*READ, "1 PUT x=1", "2 PUT y=1", "3 PUT z=1"),
    )


def test_bucket_rolled_back_while_query_runs(own_scene: Scene) -> None:
    play(
        own_scene,
        Create(),
        *puts("a", "b", "c"),
        Backup(),
        after_batch(own_scene, 1, Restore(), Put("x", "1")),
        Wait(rows=3),
        Put("d", "1"),
        ExpectError("DataLossError", ("was rolled back", "failOnDataLoss=false"), rows=4),
        Run(ACCEPT),
        ExpectRows(*READ, "4 PUT d=1", "4 PUT x=1"),
    )


def test_bucket_restored_while_query_is_stopped(scene: Scene) -> None:
    play(
        scene,
        Create(),
        *puts("a", "b", "c"),
        Run(),
        Put("d", "1"),
        RESTORE,
        Put("e", "1"),
        Run(),
        ExpectRows(*READ, "4 PUT d=1", "5 PUT e=1"),
    )


def test_bucket_restored_while_query_runs(scene: Scene) -> None:
    play(
        scene,
        Create(),
        *puts("a", "b", "c"),
        after_batch(scene, 0, Put("d", "1"), RESTORE),
        Wait(rows=4),
        Put("e", "1"),
        Wait(rows=5),
        Stop(),
        ExpectRows(*READ, "4 PUT d=1", "5 PUT e=1"),
    )
