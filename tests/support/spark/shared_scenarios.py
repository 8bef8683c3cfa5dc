"""Scenarios that both formats pass, as lists of actions: add, check, stop, start, crash, replay.

Each is a function from a scene to its actions, so that it can be played wherever Spark runs::

    play(scene, *SHARED["limits"](scene))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.spark.scenario import (
    ALL,
    KV,
    NEW,
    Action,
    Create,
    Do,
    Drop,
    ExpectBatches,
    ExpectError,
    ExpectMessages,
    ExpectNoConsumers,
    ExpectState,
    Put,
    PutMany,
    Recreate,
    Restart,
    Run,
    Scene,
    Start,
    Stop,
    Wait,
    WaitForBatch,
)

Actions = tuple[Action, ...]

HISTORY = 64
ACCEPT = {"failOnDataLoss": False}


def write_and_expect(scene: Scene) -> Actions:
    """What is there, then what comes, as it comes."""
    return (
        Create(HISTORY),
        Put("a", "1"),
        Put("b.c", "1"),
        Start(ALL[scene.format]),
        Wait(rows=2),
        Put("a", "2"),
        Wait(rows=3),
        Put("d", ""),
        Wait(rows=4),
        Stop(),
        ExpectMessages("1 a=1", "2 b.c=1", "3 a=2", "4 d="),
        ExpectNoConsumers(),
    )


def stop_and_start(scene: Scene) -> Actions:
    """What was written while the query was stopped comes when it starts again, and once."""
    options = ALL[scene.format]
    return (
        Create(HISTORY),
        Put("a", "1"),
        Start(options),
        Wait(rows=1),
        Stop(),
        Put("a", "2"),
        Put("b", "1"),
        Start(options),
        Wait(rows=3),
        Restart(),
        Put("a", "3"),
        Wait(rows=4),
        Stop(),
        Run(options),
        ExpectMessages("1 a=1", "2 a=2", "3 b=1", "4 a=3"),
    )


def only_new(scene: Scene) -> Actions:
    """The beginning is fixed by the first micro-batch, though it is empty."""
    options = NEW[scene.format]
    return (
        Create(HISTORY),
        Put("a", "1"),
        Start(options),
        WaitForBatch(0),
        Stop(),
        Put("a", "2"),
        Put("b", "1"),
        Run(options),
        ExpectMessages("2 a=2", "3 b=1"),
    )


def crash(scene: Scene) -> Actions:
    options = ALL[scene.format]

    def same_rows(scene: Scene) -> None:
        first, again = (rows for batch_id, rows in scene.attempts if batch_id == 0)
        assert first == again

    return (
        Create(HISTORY),
        PutMany(5, keys=2),
        Start(options, fail_on_batch=0),
        ExpectError("SinkError", rows=5),
        Put("c", "x"),
        Run(options),
        Do(same_rows),
        ExpectMessages("1 k0=0", "2 k1=1", "3 k0=2", "4 k1=3", "5 k0=4", "6 c=x"),
    )


def replay(scene: Scene) -> Actions:
    """From a sequence on, and from one that is still to come."""
    return (
        Create(HISTORY),
        PutMany(4, keys=2),
        Run({"startSequence": 7}),
        PutMany(2, keys=2),
        Run({"startSequence": 7}),
        ExpectMessages(),
        PutMany(2, keys=2),
        Run({"startSequence": 7}),
        ExpectMessages("7 k0=0", "8 k1=1"),
    )


def limits(scene: Scene) -> Actions:
    """No micro-batch has more rows, and all are as full as can be."""
    options = {**ALL[scene.format], "maxRowsPerTrigger": 10}
    return (
        Create(HISTORY),
        PutMany(25, keys=5),
        Run(options),
        ExpectBatches((10, 10, 5)),
        ExpectMessages(*(f"{i + 1} k{i % 5}={i}" for i in range(25))),
    )


def splits(scene: Scene) -> Actions:
    """Several tasks in a micro-batch: every row once, in order."""
    return (
        Create(HISTORY),
        PutMany(60, keys=5),
        Run({**ALL[scene.format], "minPartitions": 4}),
        ExpectMessages(*(f"{i + 1} k{i % 5}={i}" for i in range(60))),
        ExpectNoConsumers(),
    )


def filters(scene: Scene) -> Actions:
    """Only what matches, and the offset moves on over the rest."""
    options: dict[str, Any] = {**ALL[scene.format]}
    wanted = ("a.*", "b")
    if scene.format == KV:
        options["keys"] = ",".join(wanted)
    else:
        options["filterSubjects"] = ",".join(f"{scene.prefix}{one}" for one in wanted)
    return (
        Create(HISTORY),
        Put("a.1", "1"),
        Put("c", "1"),
        Put("b", "1"),
        Run(options),
        Put("c", "2"),
        Run(options),
        Put("a.2", "1"),
        Put("a.2.x", "1"),
        Run(options),
        ExpectMessages("1 a.1=1", "3 b=1", "5 a.2=1"),
    )


def recreate(scene: Scene) -> Actions:
    """The stream is another one: an error, or all of the new one."""
    options = ALL[scene.format]
    return (
        Create(HISTORY),
        PutMany(3, keys=3),
        Run(options),
        Recreate(HISTORY),
        Put("x", "1"),
        ExpectError("DataLossError", ("deleted and re-created", "failOnDataLoss"), Run(options)),
        Run({**options, **ACCEPT}),
        Put("y", "1"),
        Run(options),
        ExpectMessages("1 k0=0", "2 k1=1", "3 k2=2", "1 x=1", "2 y=1"),
    )


def aged_out(scene: Scene) -> Actions:
    """Messages aged out before they were read: an error, or what is left."""
    options = ALL[scene.format]
    return (
        Create(HISTORY),
        PutMany(3, keys=3),
        Run(options),
        PutMany(5, keys=3),
        Drop(6),
        ExpectState({"first_seq": 6, "last_seq": 8}),
        ExpectError("DataLossError", ("4 to 5 aged out", "failOnDataLoss"), Run(options)),
        Run({**options, **ACCEPT}),
        ExpectMessages("1 k0=0", "2 k1=1", "3 k2=2", "6 k2=2", "7 k0=3", "8 k1=4"),
    )


def headers(scene: Scene) -> Actions:
    """The column ``headers``, with and without values."""

    def check(scene: Scene) -> None:
        assert [row.headers for row in scene.rows] == [
            None,
            {"Trace": ["1"], "trace": ["ü"]},
            {"Nats-Msg-Size": ["0"]},
        ]

    return (
        Create(HISTORY),
        Put("a", "1"),
        Put("b", "1", {"Trace": "1", "trace": "ü"}),
        Put("c", "", {"Nats-Msg-Size": "0"}),
        Run({**ALL[scene.format], "includeHeaders": True}),
        Do(check),
    )


SHARED: dict[str, Callable[[Scene], Actions]] = {
    one.__name__: one
    for one in (
        write_and_expect,
        stop_and_start,
        only_new,
        crash,
        replay,
        limits,
        splits,
        filters,
        recreate,
        aged_out,
        headers,
    )
}

NEEDS_LIMITS = {"limits"}
"""Scenarios that need Spark to ask for the end of each micro-batch (Spark 4.2)."""

OF_ONE_STREAM = {"replay"}
"""Scenarios with an option that belongs to one stream: a query of several refuses it."""
