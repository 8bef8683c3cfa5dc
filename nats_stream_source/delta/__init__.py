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

from typing import TYPE_CHECKING, Any

from nats_stream_source.deferred import deferred
from nats_stream_source.errors import needs_extra

if TYPE_CHECKING:
    from nats_stream_source.delta.compare_with_bucket import ReconcileResult as ReconcileResult
    from nats_stream_source.delta.follower.follower import Follower as Follower
    from nats_stream_source.delta.follower.pace import FollowProgress as FollowProgress
    from nats_stream_source.delta.location import AutoLimits as AutoLimits, Engine as Engine
    from nats_stream_source.delta.rules.layout import Deletes as Deletes
    from nats_stream_source.delta.spark.debezium import (
        DebeziumChanges as DebeziumChanges,
        debezium_changes as debezium_changes,
    )
    from nats_stream_source.delta.spark.follow import follow as follow
    from nats_stream_source.delta.spark.merge import (
        MergeArguments as MergeArguments,
        maintain as maintain,
        merge as merge,
        merge_changes as merge_changes,
        reconcile as reconcile,
    )
    from nats_stream_source.delta.upkeep import (
        MaintenanceResult as MaintenanceResult,
        Upkeep as Upkeep,
    )
    from nats_stream_source.spark.session import configure as configure

MODULES = {
    "delta.compare_with_bucket": "ReconcileResult",
    "delta.follower.follower": "Follower",
    "delta.follower.pace": "FollowProgress",
    "delta.location": "AutoLimits Engine",
    "delta.rules.layout": "Deletes",
    "delta.spark.debezium": "DebeziumChanges debezium_changes",
    "delta.spark.follow": "follow",
    "delta.spark.merge": "MergeArguments maintain merge merge_changes reconcile",
    "delta.upkeep": "MaintenanceResult Upkeep",
    "spark.session": "configure",
}
"""The public names of each module."""

if not TYPE_CHECKING:
    __all__, _load = deferred(__name__, MODULES)

    def __getattr__(name: str) -> Any:
        with needs_extra("follow" if name in ("Follower", "FollowProgress") else "delta"):
            return _load(name)
