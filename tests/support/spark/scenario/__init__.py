"""Scenarios: changes of a bucket or a stream, and of a query on it, as a list of actions.

A test lists actions and expected results, in order, as Spark's own stream tests do::

    play(
        scene,
        Put("a", "1"),
        Run(),
        ExpectRows("1 PUT a=1 initial"),
        Put("a", "2"),
        Run(),
        ExpectRows("1 PUT a=1 initial", "2 PUT a=2"),
    )

``Run`` runs a query with ``Trigger.AvailableNow`` to its end. ``Start``, ``Wait`` and ``Stop``
control a query that runs continuously. All queries of a scene use the same checkpoint.
``foreachBatch`` collects the rows of a micro-batch. When Spark runs a micro-batch again, its last
attempt counts, as in any idempotent sink. ``ExpectRows`` compares all rows since the start of the
scene, so one comparison detects lost rows, duplicates and a wrong order. Conditions have deadlines;
no action sleeps for a fixed time.

The form of a row is ``<revision> <operation> <key>=<value>``, followed by `` initial`` for initial
values, and without ``=<value>`` where the value is null.

A scene has a format, and the same actions work with both formats. In a scene of ``nats_stream``,
the stream has the name that the bucket would have, and its subjects are ``<name>.<key>``:
``Put("a", "1")`` publishes to ``<name>.a``. The form of its rows is ``<sequence> <key>=<data>``.
``ExpectMessages`` uses this form for both formats, and ``ALL`` and ``NEW`` hold the options of each
format for the two start positions. Scenarios that use these run with both formats
(``shared_scenarios.py``).

``scene.py`` holds the state and ``play``; the other modules hold the actions, by what they act on.
"""

from tests.support.spark.scenario.expectations import (
    ExpectBatches,
    ExpectInitialThrough,
    ExpectMessages,
    ExpectNoConsumers,
    ExpectRows,
)
from tests.support.spark.scenario.query import (
    LIVE,
    ExpectError,
    Restart,
    Run,
    SinkError,
    Start,
    Stop,
    Wait,
    WaitForBatch,
    read,
)
from tests.support.spark.scenario.scene import (
    ALL,
    DEADLINE,
    KV,
    NEW,
    STREAM,
    Action,
    Do,
    Scene,
    logged_offset,
    play,
    shown,
)
from tests.support.spark.scenario.server import (
    Backup,
    ExpectState,
    Recreate,
    RestartServer,
    Restore,
)
from tests.support.spark.scenario.writes import (
    Create,
    CreateOther,
    Delete,
    Drop,
    Erase,
    Purge,
    Put,
    PutMany,
)

__all__ = [
    "ALL",
    "DEADLINE",
    "KV",
    "LIVE",
    "NEW",
    "STREAM",
    "Action",
    "Backup",
    "Create",
    "CreateOther",
    "Delete",
    "Do",
    "Drop",
    "Erase",
    "ExpectBatches",
    "ExpectError",
    "ExpectInitialThrough",
    "ExpectMessages",
    "ExpectNoConsumers",
    "ExpectRows",
    "ExpectState",
    "Purge",
    "Put",
    "PutMany",
    "Recreate",
    "Restart",
    "RestartServer",
    "Restore",
    "Run",
    "Scene",
    "SinkError",
    "Start",
    "Stop",
    "Wait",
    "WaitForBatch",
    "logged_offset",
    "play",
    "read",
    "shown",
]
