"""CDC into Delta Lake: a table that follows a key-value bucket.

- ``follow``: starts the query that does it
- ``Follower``: does it in this process, without Spark
- ``merge_changes``: a function for ``foreachBatch``
- ``merge``: merges one batch
- ``reconcile``: corrects rows whose keys were removed from the bucket without a marker
- ``maintain``: compacts and vacuums the table, which ``merge_changes`` also does by ``Upkeep``
- ``debezium_changes``: turns Debezium's events of a Postgres table into rows
- ``configure``: configures a session for small micro-batches, and for ``engine="spark"``

Requires the extra ``delta`` (``pip install 'nats-stream-source[delta]'``), ``Follower`` the extra
``follow``.

A name is imported when it is used. Only :mod:`spark` imports Spark: the rule (:mod:`rules`) and the
writer (:mod:`driver`) run without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nats_stream_source.errors import needs_extra

if TYPE_CHECKING:
    from nats_stream_source.delta.compare_with_bucket import ReconcileResult
    from nats_stream_source.delta.follower.follower import Follower
    from nats_stream_source.delta.follower.pace import FollowProgress
    from nats_stream_source.delta.location import AutoLimits, Engine
    from nats_stream_source.delta.rules.layout import Deletes
    from nats_stream_source.delta.spark.debezium import DebeziumChanges, debezium_changes
    from nats_stream_source.delta.spark.follow import follow
    from nats_stream_source.delta.spark.merge import (
        MergeArguments,
        maintain,
        merge,
        merge_changes,
        reconcile,
    )
    from nats_stream_source.delta.upkeep import MaintenanceResult, Upkeep
    from nats_stream_source.spark.session import configure

__all__ = [
    "AutoLimits",
    "DebeziumChanges",
    "Deletes",
    "Engine",
    "FollowProgress",
    "Follower",
    "MaintenanceResult",
    "MergeArguments",
    "ReconcileResult",
    "Upkeep",
    "configure",
    "debezium_changes",
    "follow",
    "maintain",
    "merge",
    "merge_changes",
    "reconcile",
]

MODULES = {
    "AutoLimits": "nats_stream_source.delta.location",
    "DebeziumChanges": "nats_stream_source.delta.spark.debezium",
    "Deletes": "nats_stream_source.delta.rules.layout",
    "Engine": "nats_stream_source.delta.location",
    "FollowProgress": "nats_stream_source.delta.follower.pace",
    "Follower": "nats_stream_source.delta.follower.follower",
    "MaintenanceResult": "nats_stream_source.delta.upkeep",
    "MergeArguments": "nats_stream_source.delta.spark.merge",
    "Upkeep": "nats_stream_source.delta.upkeep",
    "ReconcileResult": "nats_stream_source.delta.compare_with_bucket",
    "configure": "nats_stream_source.spark.session",
    "debezium_changes": "nats_stream_source.delta.spark.debezium",
    "follow": "nats_stream_source.delta.spark.follow",
    "maintain": "nats_stream_source.delta.spark.merge",
    "merge": "nats_stream_source.delta.spark.merge",
    "merge_changes": "nats_stream_source.delta.spark.merge",
    "reconcile": "nats_stream_source.delta.spark.merge",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    follower = MODULES[name].startswith("nats_stream_source.delta.follower")
    with needs_extra("follow" if follower else "delta"):
        module = importlib.import_module(MODULES[name])
    value = getattr(module, name)
    globals()[name] = value
    return value
