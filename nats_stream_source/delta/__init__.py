"""CDC into Delta Lake: a table that follows a key-value bucket.

- ``follow``: starts the query that does it
- ``merge_changes``: a function for ``foreachBatch``
- ``merge``: merges one batch
- ``reconcile``: removes or marks rows whose keys were removed from the bucket without a marker
- ``maintain``: compacts and vacuums the table, which ``merge_changes`` also does by ``Upkeep``
- ``debezium_changes``: turns Debezium's events of a Postgres table into rows
- ``configure``: configures a session for small micro-batches
- ``configure_delta``: configures a session for ``engine="spark"``

Requires the extra ``delta`` (``pip install 'nats-stream-source[delta]'``).
"""

from nats_stream_source.extras import import_failure

try:
    from nats_stream_source.delta.cdc.debezium import DebeziumChanges, debezium_changes
    from nats_stream_source.delta.follow import follow
    from nats_stream_source.delta.limits import AutoLimits
    from nats_stream_source.delta.location import Engine
    from nats_stream_source.delta.maintain import maintain
    from nats_stream_source.delta.merge import merge, merge_changes
    from nats_stream_source.delta.reconcile import ReconcileResult, reconcile
    from nats_stream_source.delta.spark.session import configure_delta
    from nats_stream_source.delta.table import Deletes
    from nats_stream_source.delta.upkeep import MaintenanceResult, Upkeep
    from nats_stream_source.spark.session import configure
except ModuleNotFoundError as error:
    raise import_failure(error, "delta") from error

__all__ = [
    "AutoLimits",
    "DebeziumChanges",
    "Deletes",
    "Engine",
    "MaintenanceResult",
    "ReconcileResult",
    "Upkeep",
    "configure",
    "configure_delta",
    "debezium_changes",
    "follow",
    "maintain",
    "merge",
    "merge_changes",
    "reconcile",
]
